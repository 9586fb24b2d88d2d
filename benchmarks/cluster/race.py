"""Starts a race on emulated hosts, and keeps what came of it: ways to train one model that take turns (`turns.py`)."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from cluster import Cluster
from turns import JOB, option

ABOUT = {
    "layer_ms": "sleep of a layer in forward; backward takes twice",
    "samples": "of a batch: many are work for the cores",
    "steps": "of each way in a turn",
}


def race(
    about: str | None, script: Path, results: Path, defaults: Mapping[str, float]
) -> tuple[dict[str, list[dict[str, float]]], argparse.Namespace]:
    """Run it as the command line says, and add to a file of results.

    Args:
        about: What the command line's help says of it.
        script: What each rank runs, with the job as options.
        results: A list in JSON, to which what was measured is added.
        defaults: The job, by the names in `JOB`.

    Returns:
        What a step took, by way, turn and name; and what the command line said.
    """
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--ranks-per-host", type=int, default=1)
    parser.add_argument("--rate", default="1gbit")
    for name, default in defaults.items():
        parser.add_argument(option(name), type=JOB[name], default=default, help=ABOUT.get(name))
    arguments = parser.parse_args()
    job = {name: getattr(arguments, name) for name in JOB}
    options = [text for name, value in job.items() for text in (option(name), str(value))]
    machine: dict[str, Any] = {"python": platform.python_version(), "torch": torch.__version__}
    machine |= {"cores": os.cpu_count(), "load": os.getloadavg()[0]}
    with Cluster(arguments.hosts, arguments.rate, arguments.ranks_per_host) as cluster:
        achieved = cluster.measured_rate()
        printed = cluster.run([sys.executable, str(script), *options], timeout_s=1200)
    found = json.loads(printed[0].splitlines()[-1])
    kept = json.loads(results.read_text()) if results.exists() else []
    given = {"hosts": arguments.hosts, "ranks_per_host": arguments.ranks_per_host, "rate": arguments.rate, **job}
    kept.append(given | {"machine": machine | {"achieved": achieved.as_dict()}} | found)
    results.write_text(json.dumps(kept, indent=1) + "\n")
    return found["ways"], arguments
