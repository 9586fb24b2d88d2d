"""`rows_of`: what a benchmark's ranks write, each run of them in processes of its own on this machine."""

from __future__ import annotations

import json
import multiprocessing
import os
import platform
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

MACHINE = {"python": platform.python_version(), "torch": torch.__version__, "cores": os.cpu_count()}
ROW = "row.json"
"""What rank 0 writes into the folder that all are given."""


def row_of(run: Callable[..., None], ranks: int, *arguments: Any) -> dict[str, Any]:
    """What rank 0 has written.

    Args:
        run: Called on each rank with its number, how many there are, the arguments and a folder.
        ranks: How many.
        arguments: Others, the same on all.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        given = ranks, *arguments, folder
        processes = [context.Process(target=run, args=(rank, *given), daemon=True) for rank in range(ranks)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        return json.loads(Path(folder, ROW).read_text())


def save(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write raw results, with versions."""
    path.write_text(json.dumps({"machine": MACHINE, "rows": rows}, indent=1) + "\n")
