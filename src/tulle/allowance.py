"""`cores` and `memory_bytes`: what of its machine this process may use, which in a container is not all that is there.

A container is a control group of Linux, or several, one within the other, of either version:

    version 2   /sys/fs/cgroup/GROUP                     cpu.max: "QUOTA PERIOD"                  memory.max
    version 1   /sys/fs/cgroup/{cpu,memory}/GROUP        cpu.cfs_quota_us, cpu.cfs_period_us      memory.limit_in_bytes

From within, its own folder may be mounted in the place of the topmost one, so that is always looked at.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_ROOT = Path("/")


def cores(root: Path = _ROOT) -> int:
    """Processor cores that this process may use: those it may run on, or fewer if it is given less of their time.

    Args:
        root: Where files of the kernel are.

    Example:
        >>> 1 <= cores() <= os.cpu_count()
        True
    """
    own = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return max(1, min([own, *_cores_of_groups(root)]))


def memory_bytes(root: Path = _ROOT) -> int:
    """Memory that this process may use: that of its machine, or of its container.

    Args:
        root: Where files of the kernel are.
    """
    return min([os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *_bytes_of_groups(root)])


def _cores_of_groups(root: Path) -> Iterator[int]:
    for group in _groups("cpu", root):
        for files in (["cpu.max"], ["cpu.cfs_quota_us", "cpu.cfs_period_us"]):
            words = [word for file in files for word in _words(group / file)]
            if len(words) == 2 and words[0].isdigit():  # not "max", or -1
                yield int(words[0]) // int(words[1])


def _bytes_of_groups(root: Path) -> Iterator[int]:
    for group in _groups("memory", root):
        for file in ("memory.max", "memory.limit_in_bytes"):
            yield from (int(word) for word in _words(group / file) if word.isdigit())


def _groups(controller: str, root: Path) -> Iterator[Path]:
    """Folders of the control groups that this process is in, as far as they limit something, the innermost first."""
    folder = root / "sys/fs/cgroup"
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, group = line.split(":", maxsplit=2)
        if not controllers or controller in controllers.split(","):
            top = folder / controller if controllers else folder
            inner = top / group.lstrip("/")
            yield from (one for one in (inner, *inner.parents) if one.is_relative_to(top))


def _words(file: Path) -> list[str]:
    return " ".join(_lines(file)).split()


def _lines(file: Path) -> list[str]:
    with suppress(OSError):
        return file.read_text(encoding="utf-8").splitlines()
    return []
