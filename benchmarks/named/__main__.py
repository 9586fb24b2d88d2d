"""Measures named dimensions beside plain torch and DTensor, and the layout search: `python benchmarks/named`.

Writes `results.json` beside this file and prints the tables of the README.
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

HERE = Path(__file__).parent
RANKS = {"operations": 1, "model": 4, "layouts": 4}


def main() -> None:
    """Measure, save, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3, help="runs of each (%(default)s)")
    parser.add_argument("--rounds", type=int, default=10, help="rounds in a run (%(default)s)")
    parser.add_argument("--only", choices=list(RANKS), help="measure this alone, and save nothing")
    options = parser.parse_args()
    wanted = [options.only] if options.only else list(RANKS)
    results = {what: [measure(what, options.rounds) for _ in range(options.repeats)] for what in wanted}
    for what, runs in results.items():
        for run in runs:
            for row in run["rows"] if isinstance(run, dict) else run:
                print(what, " ".join(f"{key}={shown(value)}" for key, value in row.items()))
            if isinstance(run, dict):
                print("first choice over fastest:", shown(run["first_over_fastest"]))
    if not options.only:
        machine = {
            "processor": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "command": " ".join(["python", *sys.argv]),
        }
        (HERE / "results.json").write_text(json.dumps({"machine": machine, **results}, indent=1) + "\n")


def measure(what: str, rounds: int) -> Any:
    """Run the ranks of one measurement, and give what the first prints."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS[what]}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [*command, str(HERE / "rank.py"), what, "--rounds", str(rounds)],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.strip().splitlines()[-1])


def shown(value: object) -> str:
    """A cell."""
    return f"{value:.3g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
