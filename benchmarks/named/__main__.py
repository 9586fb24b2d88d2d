"""Measures named dimensions beside plain torch and DTensor, and the layout search: `python benchmarks/named`.

Writes `results.json` beside this file, or the part of it that `--only` names, and prints what is measured; as root,
`--only wide` measures training on emulated hosts and writes `results-wide.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
RANKS = {"operations": 1, "model": 4, "layouts": 4, "wide": 4}
ON_HOSTS, RATE = "wide", "1gbit"
"""What is measured on emulated hosts, one a rank: needs root, as `benchmarks/cluster` does."""


def main() -> None:
    """Measure, save, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3, help="runs of each (%(default)s)")
    parser.add_argument("--rounds", type=int, default=10, help="rounds in a run (%(default)s)")
    parser.add_argument("--only", choices=list(RANKS), help="this alone; 'wide' needs root")
    options = parser.parse_args()
    wanted = [options.only] if options.only else [what for what in RANKS if what != ON_HOSTS]
    results = measure_on_hosts(options) if wanted == [ON_HOSTS] else {what: measure(what, options) for what in wanted}
    for what in wanted:
        for row in (row for run in results[what] for row in run):
            print(what, " ".join(f"{key}={shown(value)}" for key, value in row.items() if is_cell(value)))
    path = HERE / ("results-wide.json" if wanted == [ON_HOSTS] else "results.json")
    kept = json.loads(path.read_text()) if options.only and path.exists() else {}
    for what in results:
        kept[what] = results[what]
        kept.setdefault("machines", {})[what] = {
            "processor": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "command": " ".join(["python", *sys.argv]),
        }
    path.write_text(json.dumps(kept, indent=1) + "\n")


def measure(what: str, options: argparse.Namespace) -> list[Any]:
    """Run the ranks of one measurement as often as wanted, and give what the first prints each time."""
    ranks = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS[what]}"]
    command = [sys.executable, *ranks, str(HERE / "rank.py"), what, "--rounds", str(options.rounds)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return [
        last_line(subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout)
        for _ in range(options.repeats)
    ]


def measure_on_hosts(options: argparse.Namespace) -> dict[str, Any]:
    """The same on emulated hosts, with what their links carry."""
    sys.path.append(str(HERE.parent / "cluster"))
    from cluster import Cluster  # pyright: ignore[reportAttributeAccessIssue]

    command = [sys.executable, str(HERE / "rank.py"), ON_HOSTS, "--rounds", str(options.rounds)]
    with Cluster(hosts=RANKS[ON_HOSTS], rate=RATE) as cluster:
        runs = [last_line(cluster.run(command, timeout_s=600)[0]) for _ in range(options.repeats)]
        return {ON_HOSTS: runs, "links": [cluster.measured_rate().as_dict()]}


def last_line(printed: str) -> Any:
    """What a rank has measured."""
    return json.loads(printed.strip().splitlines()[-1])


def is_cell(value: object) -> bool:
    """Whether it is short enough to be shown."""
    return not isinstance(value, dict | list)


def shown(value: object) -> str:
    """A cell."""
    return f"{value:.3g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
