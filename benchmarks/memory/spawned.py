"""What benchmarks of ranks on one machine share: turns of several ways, each run of them in processes of its own."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

STEPS = 5
"""Of each way in a turn."""
_ROW = "row.json"


def in_turns(
    steps: Mapping[str, Callable[[], object]], turns: int, *, warm: int, count: int = STEPS
) -> dict[str, list[float]]:
    """Seconds a step of each way, by turn, which go forth and back. Every rank must call it.

    Args:
        steps: What does a step, by way.
        turns: That count.
        warm: So many before them do not.
        count: Steps in a turn.
    """
    seconds: dict[str, list[float]] = {way: [] for way in steps}
    for turn in range(turns + warm):
        for way in sorted(steps, reverse=turn % 2 == 1):
            dist.barrier()
            begin_s = time.perf_counter()
            for _ in range(count):
                steps[way]()
            dist.barrier()
            seconds[way].append((time.perf_counter() - begin_s) / count)
    return {way: times[warm:] for way, times in seconds.items()}


def write_row(folder: str, rank: int, row: Mapping[str, Any]) -> None:
    """Have rank 0 write what a run found. Every rank must call it."""
    if rank == 0:
        Path(folder, _ROW).write_text(json.dumps(row))
    dist.barrier()


def compare(
    run: Callable[..., None],
    names: Iterable[str],
    show: Callable[[dict], None],
    *,
    doc: str | None,
    turns: int,
    to: Path,
) -> None:
    """A command that runs each of some models on so many ranks of this machine, prints the lines of a table, and saves.

    Args:
        run: Called on each rank with its number, how many there are, a name, the number of turns and a folder.
        names: Of the models.
        show: Prints a line.
        doc: What the command does.
        turns: So many, if nobody says otherwise.
        to: Where raw results go, with versions.
    """
    parser = argparse.ArgumentParser(description=doc)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--turns", type=int, default=turns, help=f"of {STEPS} steps each way")
    options = parser.parse_args()
    rows = []
    for ranks in options.ranks:
        for name in names:
            rows.append(row_of(run, ranks, name, options.turns))
            show(rows[-1])
    to.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")


def machine() -> dict[str, Any]:
    """What a raw result says of where it is from."""
    return {"python": platform.python_version(), "torch": torch.__version__, "cores": os.cpu_count()}


def row_of(run: Callable[..., None], ranks: int, *arguments: Any) -> dict[str, Any]:
    """What rank 0 wrote of one run of `run(rank, ranks, *arguments, folder)`, each rank a process of its own."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        given = ranks, *arguments, folder
        processes = [context.Process(target=run, args=(rank, *given), daemon=True) for rank in range(ranks)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        return json.loads(Path(folder, _ROW).read_text())
