"""Compares ways to synchronize sparse gradients on emulated hosts: `python benchmarks/sparse-sync` (as root), `report`.

Writes `results/HOSTSxRATE.json` beside this file; `report` draws the tables of README.md and the plots from them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from job import Workload, write_json
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from runner import STUDIES, Setting, run_study, run_way, without_place
from ways import HERE, Way, peer_ways, tulle_ways
from workloads import RANKS, WORKLOADS, prepare

from report import write_report

sys.path.append(str(HERE.parent / "cluster"))
from cluster import Cluster  # pyright: ignore[reportAttributeAccessIssue]
from machine import machine  # pyright: ignore[reportMissingImports]

WORK = HERE.parents[1] / "runs" / "sparse-sync"
RESULTS = HERE / "results"


@dataclass(frozen=True)
class Comparison:
    """Everything that one command compares."""

    ways: Sequence[Way]
    missing: Sequence[str]
    workloads: dict[str, Path]
    studies: Sequence[str]
    rounds: int
    work: Path


def main() -> None:
    """Measure, or draw the report."""
    options = parse()
    if options.action == "report":
        write_report(RESULTS, HERE)
        return
    ours = [way for way in tulle_ways() if not options.ways or way.name in options.ways]
    peers, missing = peer_ways(options.ways, options.torch_index)
    ways = [*ours, *peers]
    if unknown := {*(options.ways or [])} - {way.name for way in ways} - {*missing}:
        raise SystemExit(f"no way is called {', '.join(sorted(unknown))}; leave out --ways to have all")
    if missing:
        print(f"left out, as their environments could not be made: {', '.join(missing)}", file=sys.stderr)
    paths = [*prepare(options.workloads, options.corpus, options.work / "workloads")]
    workloads = {Workload.load(path).name: path for path in paths}
    comparison = Comparison(ways, missing, workloads, options.studies, options.rounds, options.work)
    settings = [Setting(hosts, rate) for hosts in options.hosts for rate in options.rates]
    columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()]
    with Progress(*columns, TimeRemainingColumn()) as progress:
        task = progress.add_task("", total=len(settings) * (options.rounds * len(ways) + len(options.studies)))
        for setting in settings:
            result = compare(comparison, setting, lambda said: progress.update(task, description=said, advance=1))
            write_json(options.results / f"{setting}.json", result)
    print(f"results are in {options.results}; draw them with: python benchmarks/sparse-sync report")


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python benchmarks/sparse-sync", description=__doc__)
    parser.add_argument("action", nargs="?", choices=["run", "report"], default="run")
    parser.add_argument("--hosts", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--rates", nargs="+", default=["1gbit", "10gbit"])
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=[*WORKLOADS])
    parser.add_argument("--ways", nargs="+", metavar="NAME", help="only these (default: all of tulle and its peers)")
    parser.add_argument("--studies", nargs="*", choices=STUDIES, default=[*STUDIES])
    parser.add_argument("--torch-index", metavar="URL", help="where the peers' torch comes from, say without CUDA")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--corpus", type=Path, metavar="FOLDER", help="larger text; else the repository's sample")
    parser.add_argument("--work", type=Path, default=WORK, metavar="FOLDER", help="of rounds: remove it to start anew")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FOLDER")
    options = parser.parse_args()
    if max(options.hosts) > RANKS or min(options.hosts) < 2:
        parser.error(f"there are ids for 2 to {RANKS} hosts, {options.hosts} were asked for")
    return options


def compare(comparison: Comparison, setting: Setting, tell: Callable[[str], object]) -> dict[str, Any]:
    """All rounds and studies of one setting, on one cluster."""
    folder = comparison.work / str(setting)
    rounds: list[dict[str, Any]] = []
    with Cluster(setting.hosts, setting.rate) as cluster:
        measured_rate = cluster.measured_rate().as_dict()
        for number in range(1, comparison.rounds + 1):
            rounds.append({})
            for way in comparison.ways:
                place = folder / f"round{number}" / way.name
                rounds[-1][way.name] = run_way(way, comparison.workloads, setting, cluster, place)
                tell(f"{setting}, round {number}: {way.name}")
        studies: dict[str, Any] = {}
        failed: dict[str, str] = {}
        for name in comparison.studies:
            try:
                studies[name] = run_study(name, cluster, folder)
            except RuntimeError as error:  # a ClusterError; the other results are worth keeping
                failed[name] = without_place(str(error))
            tell(f"{setting}: {name}")
    return {
        "hosts": setting.hosts,
        "rate": setting.rate,
        "measured_rate": measured_rate,
        "machine": machine("python benchmarks/sparse-sync"),
        "workloads": {name: describe(Workload.load(path)) for name, path in comparison.workloads.items()},
        "left_out": list(comparison.missing),
        "rounds": rounds,
        "studies": studies,
        "failed_studies": failed,
    }


def describe(workload: Workload) -> dict[str, Any]:
    """What a reader wants to know of a workload."""
    return {
        "about": workload.about,
        "rows": sum(table.num_rows for table in workload.tables),
        "tables": len(workload.tables),
        "width": workload.tables[0].width,
        "tokens": sum(drawn.shape[-1] for drawn in workload.drawn),
    }


if __name__ == "__main__":
    main()
