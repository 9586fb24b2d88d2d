"""What users reported of sparse gradients, under plain DDP and under tulle: `python benchmarks/user-reports`.

Each case trains on two gloo ranks beside one process that takes the mean of both losses. Writes `results.json` beside
this file and prints the table of the README.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import sys
import tempfile
import time
from multiprocessing.context import SpawnProcess
from pathlib import Path

import torch
from cases import CASES
from rank import RANKS, run

HERE = Path(__file__).parent
WAYS = ("ddp", "tulle")
COLLECTIVE_TIMEOUT_S = 10.0
DEADLINE_S = 60.0


def main() -> None:
    """Run all cases, save, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="cases whose name has this text")
    options = parser.parse_args()
    rows: list[dict[str, str]] = []
    print("| case | reported | DDP | tulle |\n|---|---|---|---|", flush=True)
    for number, case in enumerate(CASES):
        if options.only in case.name:
            outcomes = {way: outcome(number, way) for way in WAYS}
            rows.append({"case": case.name, "reported": case.thread, **outcomes})
            print(f"| {case.name} | {case.thread} | {outcomes['ddp']} | {outcomes['tulle']} |", flush=True)
    if not options.only:
        machine = {"python": platform.python_version(), "torch": torch.__version__, "ranks": RANKS}
        results = {"machine": machine, "command": " ".join(["python", *sys.argv]), "cases": rows}
        (HERE / "results.json").write_text(json.dumps(results, indent=1) + "\n")


def outcome(number: int, way: str) -> str:
    """`right`, or what the first rank that says so found wrong."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        arguments = [(number, way, rank, folder, COLLECTIVE_TIMEOUT_S) for rank in range(RANKS)]
        processes = [context.Process(target=run, args=one, daemon=True) for one in arguments]
        for process in processes:
            process.start()
        end_s = time.monotonic() + DEADLINE_S
        for process in processes:
            process.join(max(0.0, end_s - time.monotonic()))
            process.kill()
        answers = [Path(folder) / f"{rank}.json" for rank in range(RANKS)]
        found = [
            json.loads(answer.read_text()) if answer.exists() else died(p)
            for answer, p in zip(answers, processes, strict=True)
        ]
    wrong = sorted({text for text in found if text is not None}, key=lambda text: "Connection closed" in text)
    return wrong[0].replace("|", "\\|") if wrong else "right"


def died(process: SpawnProcess) -> str:
    """How a rank that gave no answer ended."""
    process.join()
    return f"no answer within {DEADLINE_S:g} s" if process.exitcode == -9 else f"died with exit code {process.exitcode}"


if __name__ == "__main__":
    main()
