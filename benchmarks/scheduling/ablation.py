"""What each part of synchronization gains: `sudo .venv/bin/python benchmarks/scheduling/ablation.py --json out.json`.

A model of one large table and some layers, whose work is mostly a sleep, on emulated hosts; kept in step in nine ways,
of which each adds to, or stands beside, the one above. They take turns in one set of processes, every other turn
backwards. Prints the rows of the README's table; `--json` keeps what was measured, `--report` prints it again.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from pathlib import Path
from statistics import median
from typing import Any

import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "cluster"))

JOB = {
    "rows": (50_000, "of the table"),
    "width": (512, "of a row, and of the layers"),
    "tokens": (4096, "of a rank and step, Zipf-distributed with exponent 1.1"),
    "layers": (8, "of width x width"),
    "layer_ms": (10.0, "work of a layer in forward; backward takes twice"),
    "turns": (4, "in which every way runs once"),
    "steps": (5, "that are timed in a turn"),
}


def main() -> None:
    """Run, save, print."""
    options = parse()
    if options.report is not None:
        for result in json.loads(options.report.read_text()):
            print(table(result))
        return
    from cluster import Cluster  # pyright: ignore[reportAttributeAccessIssue]

    job = {name: getattr(options, name) for name in JOB}
    words = [text for name, value in job.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    if options.ways:
        words += ["--ways", *options.ways]
    with Cluster(hosts=options.hosts, rate=options.rate) as cluster:
        achieved = cluster.measured_rate()
        printed = cluster.run([sys.executable, str(HERE / "ablation_rank.py"), *words], timeout_s=1800)
    machine = {"python": platform.python_version(), "torch": torch.__version__, "achieved": achieved.as_dict()}
    result = {"hosts": options.hosts, "rate": options.rate, "job": job, "machine": machine}
    result |= json.loads(printed[0].splitlines()[-1])
    print(table(result))
    if options.json is not None:
        results = json.loads(options.json.read_text()) if options.json.exists() else []
        options.json.write_text(json.dumps([*results, result], indent=1) + "\n")


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hosts", type=int, default=8)
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--ways", nargs="+", metavar="NAME", help="only these (default: all)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="to which the result is added")
    parser.add_argument("--report", type=Path, metavar="FILE", help="print what is in it, measure nothing")
    for name, (value, about) in JOB.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value, help=about)
    return parser.parse_args()


def table(result: dict[str, Any]) -> str:
    """A row for each way: medians over turns, in brackets from the least to the most."""
    work_s = 3 * result["job"]["layers"] * result["job"]["layer_ms"] / 1e3
    ways = result["ways"]
    first = next(iter(ways.values()))["step_s"]
    lines = [
        f"{result['hosts']} hosts, {result['rate']}, {work_s * 1e3:.0f} ms of work; losses differ by at most "
        f"{result['largest relative difference of a loss']:.0e}",
        "",
        "| way | step, ms | under way, ms | waited, ms | hidden | MB sent | times faster than the first |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, way in ways.items():
        under_way_s, waited_s = median(way["under_way_s"]), median(way["waited_s"])
        faster = [theirs / ours for theirs, ours in zip(first, way["step_s"], strict=True)]
        cells = [
            name,
            spread([seconds * 1e3 for seconds in way["step_s"]], "{:.0f}"),
            f"{under_way_s * 1e3:.0f}",
            f"{waited_s * 1e3:.0f}",
            f"{1 - waited_s / under_way_s:.0%}",
            f"{median(way['sent_bytes']) / 1e6:.1f}",
            spread(faster, "{:.2f}"),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def spread(values: list[float], form: str) -> str:
    """The median, and from the least to the most."""
    return f"{form.format(median(values))} ({form.format(min(values))} to {form.format(max(values))})"


if __name__ == "__main__":
    main()
