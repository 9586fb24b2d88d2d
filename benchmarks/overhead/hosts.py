"""What tulle costs beside DDP on hosts of several ranks: `sudo python benchmarks/overhead/hosts.py`.

Emulated hosts (benchmarks/cluster); each row once with the ranks of a host sharing memory, and once without. Puts
its rows into `results-hosts.json` beside this file, and prints the table of the README.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "cluster"))

from cluster import Cluster  # noqa: E402  # pyright: ignore[reportAttributeAccessIssue]


def main() -> None:
    """Measure, save, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hosts", type=int, default=2, help="%(default)s")
    parser.add_argument("--ranks-per-host", type=int, default=2, help="%(default)s")
    parser.add_argument("--rates", nargs="+", default=["1gbit", "10gbit"], help="of links (%(default)s)")
    parser.add_argument("--models", nargs="+", default=["chain", "translator"], help="%(default)s")
    parser.add_argument("--rounds", type=int, default=8, help="pairs in a run (%(default)s)")
    parser.add_argument("--steps", type=int, default=4, help="of each in a pair (%(default)s)")
    options = parser.parse_args()
    path = HERE / "results-hosts.json"
    rows: list[dict[str, Any]] = json.loads(path.read_text())["rows"] if path.exists() else []
    print("| model | rate | memory within hosts | tulle, ms a step | DDP, ms a step | ratio | quartiles |")
    print("|---|---|---|---|---|---|---|")
    for rate in options.rates:
        with Cluster(options.hosts, rate, options.ranks_per_host) as cluster:
            achieved = cluster.measured_rate().as_dict()
            for model in options.models:
                for shared in ("1", "0"):
                    found = measure(cluster, model, shared, options)
                    given = {"hosts": options.hosts, "ranks_per_host": options.ranks_per_host, "rate": rate}
                    given |= {"model": model, "shared_memory": shared}
                    rows = [one for one in rows if not given.items() <= one.items()]
                    rows.append(given | {"achieved": achieved} | found)
                    print(row(rows[-1]), flush=True)
    machine = {"cores": os.cpu_count(), "python": platform.python_version(), "torch": torch.__version__}
    path.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")


def measure(cluster: Any, model: str, shared: str, options: argparse.Namespace) -> dict[str, Any]:
    """Time tulle and DDP in pairs on all ranks."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "result.json")
        job = [
            str(HERE / "measure.py"),
            model,
            "--pair",
            "tulle",
            "ddp",
            "--rounds",
            str(options.rounds),
            "--steps",
            str(options.steps),
        ]
        command = [sys.executable, *job, "--output", str(output)]
        cluster.run(command, timeout_s=600, env={"TULLE_SHARED_MEMORY": shared})
        return json.loads(output.read_text())


def row(entry: dict[str, Any]) -> str:
    """One line of the table."""
    step_s, ratio = entry["median_step_s"], entry["ratio"]
    cells = [
        entry["model"],
        entry["rate"],
        "yes" if entry["shared_memory"] == "1" else "no",
        *(f"{step_s[way] * 1e3:.0f}" for way in ("tulle", "ddp")),
        f"{ratio['median']:.3f}",
        f"{ratio['lower_quartile']:.2f} to {ratio['upper_quartile']:.2f}",
    ]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
