"""Compares whole trainings on emulated hosts: `python benchmarks/end-to-end` (as root), and `report`.

Writes `results/HOSTSxRATE.json` beside this file; `report` draws the tables of README.md from them.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path += [str(HERE.parent / "sparse-sync"), str(HERE.parent / "cluster")]
# ruff: noqa: E402
from cluster import Cluster  # pyright: ignore[reportAttributeAccessIssue]
from contenders import our_ways, peer_ways, trains
from job import Workload, write_json
from machine import machine
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from runner import Setting, run_way
from texts import TEXTS, prepare
from ways import Way
from workloads import RANKS

from tables import write_tables

WORK = HERE.parents[1] / "runs" / "end-to-end"
RESULTS = HERE / "results"


@dataclass(frozen=True)
class Comparison:
    """Everything that one command compares."""

    ways: Sequence[Way]
    missing: Sequence[str]
    workloads: Mapping[str, Path]
    rounds: int
    dense_rounds: int
    work: Path

    def ways_in(self, number: int) -> list[Way]:
        """The ways of a round; every other one goes backwards, so that none always comes after the same."""
        ways = [way for way in self.ways if not way.is_dense or number <= self.dense_rounds]
        return ways if number % 2 else ways[::-1]


def main() -> None:
    """Measure, or draw the report."""
    options = parse()
    if options.action == "report":
        write_tables(options.results, HERE)
        return
    peers, missing = peer_ways(options.ways, options.torch_index)
    ways = [*our_ways(options.ways), *peers]
    if unknown := {*(options.ways or [])} - {way.name for way in ways} - {*missing}:
        raise SystemExit(f"no way is called {', '.join(sorted(unknown))}; leave out --ways to have all")
    if missing:
        print(f"left out, as their environments could not be made: {', '.join(missing)}", file=sys.stderr)
    workloads = prepare(options.workloads, options.corpus, options.work / "workloads")
    comparison = Comparison(ways, missing, workloads, options.rounds, options.dense_rounds, options.work)
    settings = [Setting(hosts, rate) for hosts in options.hosts for rate in options.rates]
    columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()]
    with Progress(*columns, TimeRemainingColumn()) as progress:
        runs = sum(len(comparison.ways_in(number)) for number in range(1, options.rounds + 1))
        task = progress.add_task("", total=len(settings) * runs)
        for setting in settings:
            result = compare(comparison, setting, lambda said: progress.update(task, description=said, advance=1))
            write_json(options.results / f"{setting}.json", result)
    print(f"results are in {options.results}; draw them with: python benchmarks/end-to-end report")


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python benchmarks/end-to-end", description=__doc__)
    parser.add_argument("action", nargs="?", choices=["run", "report"], default="run")
    parser.add_argument("--hosts", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--rates", nargs="+", default=["1gbit", "10gbit"])
    parser.add_argument("--workloads", nargs="+", choices=TEXTS, default=[*TEXTS])
    parser.add_argument("--ways", nargs="+", metavar="NAME", help="only these (default: all of tulle and its peers)")
    parser.add_argument("--torch-index", metavar="URL", help="where the peers' torch comes from, say without CUDA")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dense-rounds", type=int, default=1, help="of ways that send whole tables, and take long")
    parser.add_argument("--corpus", type=Path, metavar="FOLDER", help="larger text; else the repository's sample")
    parser.add_argument("--work", type=Path, default=WORK, metavar="FOLDER", help="of rounds: remove it to start anew")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FOLDER")
    options = parser.parse_args()
    if max(options.hosts) > RANKS or min(options.hosts) < 2:
        parser.error(f"there are ids for 2 to {RANKS} hosts, {options.hosts} were asked for")
    return options


def compare(comparison: Comparison, setting: Setting, tell: Callable[[str], object]) -> dict[str, Any]:
    """All rounds of one setting, on one cluster."""
    rounds: list[dict[str, Any]] = []
    with Cluster(setting.hosts, setting.rate) as cluster:
        measured_rate = cluster.measured_rate().as_dict()
        for number in range(1, comparison.rounds + 1):
            rounds.append({})
            for way in comparison.ways_in(number):
                place = comparison.work / str(setting) / f"round{number}" / way.name
                asked = {name: path for name, path in comparison.workloads.items() if trains(way, name)}
                rounds[-1][way.name] = run_way(way, asked, setting, cluster, place)
                tell(f"{setting}, round {number}: {way.name}")
    return {
        "hosts": setting.hosts,
        "rate": setting.rate,
        "measured_rate": measured_rate,
        "machine": machine("python benchmarks/end-to-end"),
        "workloads": {name: describe(Workload.load(path)) for name, path in comparison.workloads.items()},
        "left_out": list(comparison.missing),
        "rounds": rounds,
    }


def describe(workload: Workload) -> dict[str, Any]:
    """What a reader wants to know of a workload."""
    return {
        "about": workload.about,
        "rows": sum(table.num_rows for table in workload.tables),
        "tables": len(workload.tables),
        "width": workload.tables[0].width,
    }


if __name__ == "__main__":
    main()
