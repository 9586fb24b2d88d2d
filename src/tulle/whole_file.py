"""`write_whole`: a file that is complete or absent, whoever reads it when."""

from __future__ import annotations

import errno
import os
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write a text file aside, then rename it: a reader finds all of it, or what was there before.

    What a link leads to is written, and the link stays. What is no file, a pipe or a device, is written to as it is: to
    rename something to `/dev/null` would take it from all programs of the machine.

    Raises:
        OSError: If it cannot be written, or is a folder; nothing is left aside then.
    """
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return
    path = path.resolve()
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        aside.write_text(text, encoding="utf-8")
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
