"""What late updates gain: `sudo .venv/bin/python benchmarks/scheduling --hosts 4 --rate 1gbit`.

A model of alike layers, whose work is mostly a sleep, on emulated hosts; its updates are done in the optimizer's step,
or when parameters are read, with pieces of gradients in the order in which they come, or by urgency. The ways take
turns in one run. Adds to `results.json` beside this file, and prints rows of the README's table.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from statistics import median

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "cluster"))

from race import race  # noqa: E402  # pyright: ignore[reportMissingImports]

JOB = {"layers": 12, "width": 1024, "layer_ms": 20.0, "samples": 8, "turns": 5, "steps": 4}


def main() -> None:
    """Run, save, print."""
    report(*race(__doc__, HERE / "rank.py", HERE / "results.json", JOB))


def report(ways: dict[str, list[dict[str, float]]], arguments: argparse.Namespace) -> None:
    """Print a row for each way: median, least and most of a step, and how often faster than the first way."""
    work_s = 3 * arguments.layers * arguments.layer_ms / 1e3
    print("| hosts | rate | work, ms | update | step, ms | least | most | waiting, ms | times faster (least to most) |")
    print("|---|---|---|---|---|---|---|---|---|")
    base = [turn["step_s"] for turn in next(iter(ways.values()))]
    for way, turns in ways.items():
        seconds, waited = ([turn[name] for turn in turns] for name in ("step_s", "waited_s"))
        ratios = [theirs / ours for theirs, ours in zip(base, seconds, strict=True)]
        cells = [arguments.hosts, arguments.rate, f"{work_s * 1e3:.0f}", way]
        cells += [f"{value * 1e3:.0f}" for value in (median(seconds), min(seconds), max(seconds), median(waited))]
        print(
            "| " + " | ".join(map(str, cells)) + f" | {median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}) |"
        )


if __name__ == "__main__":
    main()
