"""What it gains to send parameters and gradients beside what computes: `sudo python benchmarks/memory/beside.py`.

A model of alike layers, whose work is in part a sleep, on emulated hosts, shared out in some ways that take turns in
one run. Adds to `beside.json` beside this file, and prints rows of the README's table.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from statistics import median

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "cluster"))

from race import race  # noqa: E402  # pyright: ignore[reportMissingImports]

JOB = {"layers": 8, "width": 512, "layer_ms": 40.0, "samples": 64, "turns": 5, "steps": 3}


def main() -> None:
    """Run, save, print."""
    report(*race(__doc__, HERE / "beside_rank.py", HERE / "beside.json", JOB))


def report(ways: dict[str, list[dict[str, float]]], arguments: argparse.Namespace) -> None:
    """Print a row for each way: medians, and of what stands beside it in a turn how often faster than the first way."""
    print("| hosts x ranks | rate | sleep of a layer, ms | way | step, ms | of a core, ms | sent, MB | times faster |")
    print("|---|---|---|---|---|---|---|---|")
    base = [turn["step_s"] for turn in next(iter(ways.values()))]
    for way, turns in ways.items():
        step_s, cores_s, sent_bytes = (median(turn[name] for turn in turns) for name in turns[0])
        ratios = [theirs / turn["step_s"] for theirs, turn in zip(base, turns, strict=True)]
        cells = [
            f"{arguments.hosts} x {arguments.ranks_per_host}",
            arguments.rate,
            f"{arguments.layer_ms:g}",
            way,
            f"{step_s * 1e3:.0f}",
        ]
        cells += [f"{cores_s * 1e3:.0f}", f"{sent_bytes / 1e6:.1f}" if sent_bytes else ""]
        cells += [f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"]
        print("| " + " | ".join(str(cell) for cell in cells) + " |")


if __name__ == "__main__":
    main()
