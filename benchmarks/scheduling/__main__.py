"""What late updates gain: `sudo .venv/bin/python benchmarks/scheduling --hosts 4 --rate 1gbit`.

A model of alike layers, whose work is mostly a sleep, on emulated hosts; its updates are done in the optimizer's step,
or when parameters are read, with pieces of gradients in the order in which they come, or by urgency. The ways take
turns in one run. Adds to `results.json` beside this file, and prints rows of the README's table.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from pathlib import Path
from statistics import median

import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "cluster"))

from cluster import Cluster  # noqa: E402  # pyright: ignore[reportAttributeAccessIssue]


def main() -> None:
    """Run, save, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layer-ms", type=float, default=20.0, help="work of a layer in forward; backward takes twice")
    parser.add_argument("--samples", type=int, default=8, help="of a batch: many are work for the cores")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4, help="of each way in a turn")
    arguments = parser.parse_args()
    job = {name: getattr(arguments, name) for name in ("layers", "width", "layer_ms", "samples", "turns", "steps")}
    options = [text for name, value in job.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    with Cluster(hosts=arguments.hosts, rate=arguments.rate) as cluster:
        achieved = cluster.measured_rate()
        printed = cluster.run([sys.executable, str(HERE / "rank.py"), *options], timeout_s=1200)
    result = json.loads(printed[0].splitlines()[-1])
    report(result["ways"], arguments)
    path = HERE / "results.json"
    results = json.loads(path.read_text()) if path.exists() else []
    machine = {"python": platform.python_version(), "torch": torch.__version__, "achieved": achieved.as_dict()}
    results.append({"hosts": arguments.hosts, "rate": arguments.rate} | job | {"machine": machine} | result)
    path.write_text(json.dumps(results, indent=1) + "\n")


def report(ways: dict[str, list[list[float]]], arguments: argparse.Namespace) -> None:
    """Print a row for each way: median, least and most of a step, and how often faster than the first way."""
    work_s = 3 * arguments.layers * arguments.layer_ms / 1e3
    print("| hosts | rate | work, ms | update | step, ms | least | most | waiting, ms | times faster (least to most) |")
    print("|---|---|---|---|---|---|---|---|---|")
    base = [seconds for seconds, _ in next(iter(ways.values()))]
    for way, turns in ways.items():
        seconds, waited = ([turn[part] for turn in turns] for part in range(2))
        ratios = [theirs / ours for theirs, ours in zip(base, seconds, strict=True)]
        cells = [arguments.hosts, arguments.rate, f"{work_s * 1e3:.0f}", way]
        cells += [f"{value * 1e3:.0f}" for value in (median(seconds), min(seconds), max(seconds), median(waited))]
        print(
            "| " + " | ".join(map(str, cells)) + f" | {median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}) |"
        )


if __name__ == "__main__":
    main()
