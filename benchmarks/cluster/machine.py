"""What a benchmark ran on, and how it was started."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_FOLDERS = ("--corpus", "--work", "--results")


def machine(program: str) -> dict[str, Any]:
    """What a result file says of the machine, and of the command line after the program's name."""
    information = Path("/proc/cpuinfo")
    lines = information.read_text().splitlines() if information.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {
        "processor": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "command": _without_places([program, *sys.argv[1:]]),
    }


def _without_places(arguments: Sequence[str]) -> str:
    """The command line, without where folders lie on this machine."""
    return " ".join(
        "FOLDER" if Path(argument).is_absolute() or before in _FOLDERS else argument
        for before, argument in zip(["", *arguments], arguments, strict=False)
    )
