"""Runs ways on emulated hosts in interleaved rounds, keeps what every rank wrote, and goes on where it was ended.

    round 1   way A: all workloads   way B: all workloads   ...
    round 2   way A: all workloads   way B: all workloads   ...

What disturbs the machine for a while disturbs all ways alike, and ratios are taken within a round.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any, Protocol

from job import Workload, write_json
from ways import HERE, Way, steps

WAY_TIMEOUT_S = 1200.0
STUDY_TIMEOUT_S = 3600.0
STUDIES = {"grid": HERE / "grid_worker.py", "tied": HERE / "tied_worker.py"}
"""Programs of one set of processes each, which compare inside; they write `<name>.json`."""


class Hosts(Protocol):
    """What of a `Cluster` is used here."""

    hosts: int

    def run(
        self, command: Sequence[str], *, timeout_s: float | None = None, env: Mapping[str, str] | None = None
    ) -> list[str]:
        """Run a command once per rank."""
        ...


@dataclass(frozen=True)
class Setting:
    """So many hosts on links of such a rate."""

    hosts: int
    rate: str

    def __str__(self) -> str:
        return f"{self.hosts}x{self.rate}"

    @property
    def bytes_per_s(self) -> float | None:
        """Of a link; None if it is not limited."""
        units = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
        digits = self.rate.rstrip("abcdefghijklmnopqrstuvwxyz")
        return float(digits) * units[self.rate.removeprefix(digits)] / 8 if digits else None


def run_way(way: Way, workloads: Mapping[str, Path], setting: Setting, cluster: Hosts, folder: Path) -> dict[str, Any]:
    """Measure one way on all workloads once, or read what was measured before.

    A way that fails on a workload is started again for those after it; why it failed is part of the result.
    """
    result_path = folder / "way.json"
    known: dict[str, dict[str, Any]] = {"workloads": {}, "errors": {}}
    if result_path.exists():
        known = json.loads(result_path.read_text())
    folder.mkdir(parents=True, exist_ok=True)
    errors: dict[str, str] = dict(known["errors"])
    asked = [name for name in workloads if name not in known["workloads"] and name not in errors]
    waiting = {name: workloads[name] for name in asked}
    for name in asked:  # of a run that was ended, some ranks may have written theirs
        for rank in range(cluster.hosts):
            (folder / f"{name}.rank{rank}.json").unlink(missing_ok=True)
    while waiting:
        error = _attempt(way, waiting, setting, cluster, folder)
        done = [name for name in waiting if _is_measured(name, cluster.hosts, folder)]
        left = [name for name in waiting if name not in done]
        if left:
            errors[left[0]] = error or "wrote no result"
        waiting = {name: waiting[name] for name in left[1:]}
    measured = {name: merge(_ranks(name, cluster.hosts, folder)) for name in asked if name not in errors}
    result = {"way": way.name, "is_peer": way.is_peer, "is_sharded": way.is_sharded, "about": way.about}
    result |= {"workloads": {**known["workloads"], **measured}, "errors": errors}
    write_json(result_path, result)
    return result


def run_study(name: str, cluster: Hosts, folder: Path) -> dict[str, Any]:
    """Run one of `STUDIES`, or read what it wrote before."""
    path = folder / f"{name}.json"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, str(STUDIES[name]), "--output", str(folder)]
        cluster.run(command, timeout_s=STUDY_TIMEOUT_S)
    return json.loads(path.read_text())


def merge(ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One result of all ranks': a step takes as long as on the slowest."""
    first = ranks[0]
    sent = [rank["sent_bytes_per_step"] for rank in ranks if rank["sent_bytes_per_step"] is not None]
    return {
        "step_s": [max(times) for times in zip(*(rank["step_s"] for rank in ranks), strict=True)],
        "local_step_s": [max(times) for times in zip(*(rank["local_step_s"] for rank in ranks), strict=True)],
        "sent_bytes_per_step": {"mean": mean(sent), "most": max(sent)} if sent else None,
        "peak_resident_bytes": max(rank["peak_resident_bytes"] for rank in ranks),
        "resident_bytes_before": max(rank["resident_bytes_before"] or 0 for rank in ranks),
        "rows_touched": mean(mean(rank["rows_touched"]) for rank in ranks),
        "versions": first["versions"],
        "more": first["more"],
    }


def without_place(said: str) -> str:
    """A message without the folder that the repository lies in: results are kept, and shown to others."""
    return said.replace(f"{HERE.parents[1]}/", "")


def _attempt(way: Way, workloads: Mapping[str, Path], setting: Setting, cluster: Hosts, folder: Path) -> str | None:
    """Run the worker on all hosts; what went wrong, if anything did."""
    requests: list[dict[str, object]] = []
    for path in workloads.values():
        timed, warmup = steps(way, Workload.load(path), setting.hosts, setting.bytes_per_s)
        requests.append({"workload": str(path), "steps": timed, "warmup": warmup})
    write_json(folder / "requests.json", requests)
    command = [str(way.python), str(way.worker), "--way", way.name]
    command += ["--requests", str(folder / "requests.json"), "--output", str(folder)]
    try:
        cluster.run(command, timeout_s=WAY_TIMEOUT_S, env=way.environment)
    except RuntimeError as error:  # a ClusterError: a rank failed, or the time was over
        return without_place(str(error))
    return None


def _is_measured(workload: str, hosts: int, folder: Path) -> bool:
    return all((folder / f"{workload}.rank{rank}.json").exists() for rank in range(hosts))


def _ranks(workload: str, hosts: int, folder: Path) -> list[dict[str, Any]]:
    return [json.loads((folder / f"{workload}.rank{rank}.json").read_text()) for rank in range(hosts)]
