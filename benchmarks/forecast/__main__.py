"""Predicted against measured steps on emulated hosts: `python benchmarks/forecast` (as root), and `report`.

Writes `results/HOSTSxRATE.json` beside this file; `report` draws the tables of README.md from them.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path += [str(HERE.parent / "cluster")]
# ruff: noqa: E402
from cluster import Cluster  # pyright: ignore[reportAttributeAccessIssue]
from jobs import JOBS, NAMED
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
    settings = [(hosts, rate) for hosts in options.hosts for rate in options.rates]
    columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()]
    with Progress(*columns, TimeRemainingColumn(), disable=options.json) as progress:
        task = progress.add_task("", total=len(settings) * len(options.jobs))
        for hosts, rate in settings:
            with Cluster(hosts, rate) as cluster:
                for job in options.jobs:
                    progress.update(task, description=f"{hosts} hosts at {rate}: {job}")
                    keep(options.results / f"{hosts}x{rate}.json", job, measure(cluster, job, options))
                    progress.advance(task)
    if options.json:
        print(json.dumps(as_json(options.results)))


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
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FOLDER")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else on stdout")
    return parser.parse_args()


def measure(cluster: Cluster, job: str, options: argparse.Namespace) -> dict[str, Any]:
    """One job on all hosts of a cluster."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(HERE / "rank.py"), "--jobs", job, "--output", folder]
        for name in ("plans", "steps", "rounds"):
            command += [f"--{name}", str(getattr(options, name))]
        cluster.run(command, timeout_s=TIMEOUT_S)
        return json.loads((Path(folder) / f"{job}.json").read_text())


def keep(path: Path, job: str, result: dict[str, Any]) -> None:
    """Add a job to what is known of a setting; others stay as they are."""
    known: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"jobs": {}}
    hosts, _, rate = path.stem.partition("x")
    whole = {"hosts": int(hosts), "rate": rate, "machine": machine(), "jobs": {**known["jobs"], job: result}}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(whole, indent=1) + "\n")


def machine() -> dict[str, Any]:
    """What all this ran on."""
    information = Path("/proc/cpuinfo")
    lines = information.read_text().splitlines() if information.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {
        "processor": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


if __name__ == "__main__":
    main()
