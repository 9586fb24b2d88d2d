"""What it gains to send parameters and gradients beside what computes: `sudo python benchmarks/memory/beside.py`.

A model of alike layers, whose work is in part a sleep, on emulated hosts, shared out in some ways that take turns in
one run. Adds to `beside.json` beside this file, and prints rows of the README's table.
"""

from __future__ import annotations

import argparse
import json
import os
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
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument(
        "--layer-ms", type=float, default=40.0, help="sleep of a layer in forward; backward takes twice"
    )
    parser.add_argument("--samples", type=int, default=64, help="of a batch: many are work for the cores")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="of each way in a turn")
    arguments = parser.parse_args()
    job = {name: getattr(arguments, name) for name in ("layers", "width", "layer_ms", "samples", "turns", "steps")}
    options = [text for name, value in job.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    with Cluster(hosts=arguments.hosts, rate=arguments.rate) as cluster:
        achieved = cluster.measured_rate()
        printed = cluster.run([sys.executable, str(HERE / "beside_rank.py"), *options], timeout_s=1200)
    result = json.loads(printed[0].splitlines()[-1])
    report(result["ways"], arguments)
    path = HERE / "beside.json"
    results = json.loads(path.read_text()) if path.exists() else []
    machine = {"python": platform.python_version(), "torch": torch.__version__, "cores": os.cpu_count()}
    machine |= {"load": os.getloadavg()[0], "achieved": achieved.as_dict()}
    results.append({"hosts": arguments.hosts, "rate": arguments.rate} | job | {"machine": machine} | result)
    path.write_text(json.dumps(results, indent=1) + "\n")


def report(ways: dict[str, list[dict[str, float]]], arguments: argparse.Namespace) -> None:
    """Print a row for each way: medians, and of what stands beside it in a turn how often faster than the first way."""
    print("| hosts | rate | sleep of a layer, ms | way | step, ms | of a core, ms | sent, MB | times faster |")
    print("|---|---|---|---|---|---|---|---|")
    base = [turn["step_s"] for turn in next(iter(ways.values()))]
    for way, turns in ways.items():
        step_s, cores_s, sent_bytes = (median(turn[name] for turn in turns) for name in turns[0])
        ratios = [theirs / turn["step_s"] for theirs, turn in zip(base, turns, strict=True)]
        cells = [arguments.hosts, arguments.rate, f"{arguments.layer_ms:g}", way, f"{step_s * 1e3:.0f}"]
        cells += [f"{cores_s * 1e3:.0f}", f"{sent_bytes / 1e6:.1f}" if sent_bytes else ""]
        cells += [f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"]
        print("| " + " | ".join(str(cell) for cell in cells) + " |")


if __name__ == "__main__":
    main()
