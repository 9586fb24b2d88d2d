"""Predicted against measured steps on emulated hosts: `python benchmarks/forecast` (as root), and `report`.

Writes `results/HOSTSxRATE.json` beside this file, job by job, and goes on where it was stopped; `report` draws the
tables of README.md from them.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path += [str(HERE.parent / "cluster")]
# ruff: noqa: E402
from agenda import Effort, Item, agenda, keep, told, within
from cluster import Cluster, RankError  # pyright: ignore[reportAttributeAccessIssue]
from jobs import JOBS, NAMED
from machine import machine
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from tables import as_json, write_tables

RESULTS = HERE / "results"
TIMEOUT_S = 1800.0


def main() -> None:
    """Measure, or draw the report."""
    options = parse()
    if options.action == "report":
        if options.json:
            print(json.dumps(as_json(options.results)))
        else:
            write_tables(options.results, HERE)
        return
    effort = Effort(options.plans, options.steps, options.rounds, options.finals)
    items = [*agenda(options.hosts, options.rates, options.jobs)]
    if not options.anew:
        items = [item for item in items if not item.is_done(options.results, effort)]
    if options.minutes is not None:
        items = within(items, effort, 60 * options.minutes)
    print(told(items, effort), file=sys.stderr, flush=True)
    if not options.dry:
        measure_all(items, effort, options)
    if options.json:
        print(json.dumps(as_json(options.results)))


def measure_all(items: Sequence[Item], effort: Effort, options: argparse.Namespace) -> None:
    """Measure one job after the other and keep each at once; one that fails is told, and left for the next time."""
    columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()]
    with Progress(*columns, TimeRemainingColumn(), disable=options.json) as progress:
        task = progress.add_task("", total=len(items))
        for (hosts, rate), some in groupby(items, lambda item: (item.hosts, item.rate)):
            with Cluster(hosts, rate) as cluster:
                for item in some:
                    progress.update(task, description=f"{hosts} hosts at {rate}: {item.job}")
                    begin_s = time.monotonic()
                    try:
                        result = measure(cluster, item.job, effort)
                    except RankError as error:
                        print(f"{item}: {error}", file=sys.stderr, flush=True)
                    else:
                        result |= {"effort": vars(effort), "took_s": round(time.monotonic() - begin_s, 1)}
                        keep(item.path(options.results), item.job, result, machine("python benchmarks/forecast"))
                    progress.advance(task)


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python benchmarks/forecast", description=__doc__)
    parser.add_argument("action", nargs="?", choices=["run", "report"], default="run")
    parser.add_argument("--hosts", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--rates", nargs="+", default=["1gbit", "10gbit"])
    parser.add_argument("--jobs", nargs="+", choices=[*JOBS, NAMED], default=[*JOBS, NAMED])
    parser.add_argument("--plans", type=int, default=3, help="to time beside the planner's own (%(default)s)")
    parser.add_argument("--steps", type=int, default=10, help="timed of a plan in a round (%(default)s)")
    parser.add_argument("--rounds", type=int, default=2, help="(%(default)s)")
    parser.add_argument(
        "--finals",
        type=int,
        default=0,
        help="turns that the three fastest rivals take beside the planner's (%(default)s)",
    )
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FOLDER")
    parser.add_argument("--minutes", type=float, help="begin only what is expected to end in so many minutes")
    parser.add_argument("--anew", action="store_true", help="measure also what was measured with as much effort")
    parser.add_argument("--dry", action="store_true", help="say how long it takes, and measure nothing")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else on stdout")
    return parser.parse_args()


def measure(cluster: Cluster, job: str, effort: Effort) -> dict[str, Any]:
    """One job on all hosts of a cluster."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-X", "faulthandler", str(HERE / "rank.py"), "--jobs", job, "--output", folder]
        for name, number in vars(effort).items():
            command += [f"--{name}", str(number)]
        cluster.run(command, timeout_s=TIMEOUT_S)
        return json.loads((Path(folder) / f"{job}.json").read_text())


if __name__ == "__main__":
    main()
