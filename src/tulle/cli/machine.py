"""What this machine is and has: versions, backends, devices."""

from __future__ import annotations

import platform
import sys
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TypedDict

import torch
import torch.distributed as dist

from tulle import __version__
from tulle.allowance import cores, memory_bytes
from tulle.report import quantity

_OLDEST_PYTHON = (3, 11)
_OLDEST_TORCH = (2, 10)


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the doctor's report.

    Args:
        name: What was looked at.
        ok: True, False, or None where it is only told and nothing depends on it.
        detail: What was found.
        mend: What to do if it is not as it should be.
    """

    name: str
    ok: bool | None
    detail: str
    mend: str = ""


class Devices(TypedDict):
    """What computes, and the memory beside it."""

    cpu: str
    cores: int
    memory_bytes: int
    gpus: list[str]


def machine_checks() -> list[Check]:
    """Check what can be checked without starting processes."""
    return [*_version_checks(), *_backend_checks(), *_device_checks(), _package_check()]


def versions() -> dict[str, str]:
    """Versions of what tulle stands on."""
    return {"tulle": __version__, "torch": torch.__version__, "python": platform.python_version()}


def backends() -> dict[str, bool]:
    """Which backends of `torch.distributed` this PyTorch has."""
    return {name: dist.is_backend_available(name) for name in ("gloo", "nccl", "mpi", "ucc")}


def devices() -> Devices:
    """Processor, cores that may be used, memory, and GPUs by name."""
    return {
        "cpu": _cpu_model(),
        "cores": cores(),
        "memory_bytes": memory_bytes(),
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
    }


def _version_checks() -> list[Check]:
    found = versions()
    torch_version = tuple(int(part) for part in found["torch"].split("+")[0].split(".")[:2])
    return [
        Check("tulle", True, found["tulle"]),
        Check("python", sys.version_info >= _OLDEST_PYTHON, found["python"], "install Python 3.11 or later"),
        Check("torch", torch_version >= _OLDEST_TORCH, found["torch"], 'pip install "torch>=2.10"'),
    ]


def _backend_checks() -> list[Check]:
    found = backends()
    needed = {"gloo": True, "nccl": torch.cuda.is_available()}
    install = "install the PyTorch build for your machine from pytorch.org/get-started"
    return [
        Check(name, (has or None) if not needed.get(name) else has, _presence(name, has=has), install)
        for name, has in found.items()
    ]


def _presence(name: str, *, has: bool) -> str:
    use = {"gloo": " (for CPU)", "nccl": " (for GPU)"}.get(name, "")
    return ("available" if has else "not in this build of PyTorch") + use


def _device_checks() -> list[Check]:
    found = devices()
    cores, memory = quantity.plural(found["cores"], "core"), quantity.size(found["memory_bytes"])
    gpus = ", ".join(found["gpus"]) or "none: training runs on the CPU"
    return [
        Check("processor", True, f"{found['cpu']}, {cores}, {memory} of memory"),
        Check("GPUs", bool(found["gpus"]) or None, gpus),
    ]


def _package_check() -> Check:
    missing = [name for name in ("matplotlib", "jinja2") if find_spec(name) is None]
    if missing:
        return Check("report", None, f'no report without {" and ".join(missing)}: pip install "tulle[report]"')
    return Check("report", True, "matplotlib and jinja2 are there")


def _cpu_model() -> str:
    with suppress(OSError):  # Linux
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
