"""`tulle doctor`: checks versions, backends and devices, then lets processes reach and time each other."""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from tulle.cli.console import console
from tulle.cli.failures import collect, describe
from tulle.cli.folder import Description, RunFolder
from tulle.cli.hosts import parse_hosts
from tulle.cli.launch import Outcome, default_processes, place_on_hosts
from tulle.cli.machine import Check, backends, devices, machine_checks, versions
from tulle.cli.options import Split
from tulle.cli.progress import RunProgress
from tulle.cli.run import exit_code, start
from tulle.report import quantity

SCRIPT = Path(__file__).with_name("doctor_ranks.py")
_FEWEST_PROCESSES = 2  # one process alone has nobody to reach


class _NoView:
    """Shows nothing: the report follows at the end."""

    def show_line(self, line: str) -> None:
        """Leave it in the log."""

    def show_progress(self, progress: RunProgress) -> None:
        """There are no steps."""

    def close(self) -> None:
        """Nothing is open."""


def doctor(split: Split, *, processes: str | None, hosts: str | None, as_json: bool) -> int:
    """Check the machine, print what was found, and return the exit code.

    Raises:
        UsageError: Before anything is started, if the options do not fit.
        CommunicationError: If the machines did not find each other.
    """
    names = [] if hosts is None else parse_hosts(hosts)
    if processes is None and "nproc_per_node" not in split.given:
        processes = str(max(_FEWEST_PROCESSES, default_processes()))
    place_on_hosts(split, names, processes)
    checks = machine_checks()
    with tempfile.TemporaryDirectory(prefix="tulle-doctor-") as scratch:
        folder = RunFolder(Path(scratch), Description([str(SCRIPT)], names or ["localhost"]))
        outcome = start(split.torchrun, folder, _NoView, notes=Console(quiet=True))
        measured = _measured(folder)
        if not outcome.interrupted_by:
            checks += _process_checks(folder, outcome, measured)
    ok = all(check.ok is not False for check in checks)
    if as_json:
        print(json.dumps(_as_json(checks, measured, ok=ok)))
    else:
        _print(checks)
    return exit_code(outcome) or int(not ok)


def _measured(folder: RunFolder) -> dict[int, dict[str, Any]]:
    """What each rank of this machine found, by rank; a rank that failed found nothing."""
    paths = {rank: folder.path / f"doctor-rank-{rank}.json" for rank in sorted(folder.logs)}
    return {rank: json.loads(path.read_text(encoding="utf-8")) for rank, path in paths.items() if path.exists()}


def _process_checks(folder: RunFolder, outcome: Outcome, measured: dict[int, dict[str, Any]]) -> list[Check]:
    started = quantity.plural(folder.processes, "process")
    if outcome.endings:
        failed = collect(folder.path, outcome.endings, since_s=folder.started.timestamp())
        text = describe(failed, folder.logs)
        return [Check("processes", False, f"{started}: {text}", _mend(text))]
    everyone = set(range(folder.processes))
    deaf = [f"{rank} and {other}" for rank, found in measured.items() for other in everyone - set(found["reached"])]
    first = next(iter(measured.values()))
    detail = f"{started} reach each other in every pair ({first['backend']}, {first['device'].split(':')[0]})"
    if folder.processes == 1:
        detail = f"{started} alone has nobody to reach, give --processes 2 or more to see the network"
    if deaf:
        detail = f"these ranks do not understand each other: {', '.join(deaf)}"
    mend = "run it again with TORCH_DISTRIBUTED_DEBUG=DETAIL and look at the network between their hosts"
    return [Check("processes", not deaf, detail, mend), *_network_checks(first)]


def _network_checks(found: dict[str, Any]) -> list[Check]:
    checks = []
    for axis, network in found["network"].items():
        latency, bandwidth = network["latency_s"], network["bandwidth_bytes_per_s"]
        speed = f"latency {quantity.duration(latency)}, bandwidth {quantity.size(bandwidth)}/s"
        checks.append(Check(f"axis {axis}={found['axes'][axis]}", True, speed))
    return checks


def _mend(text: str) -> str:
    if "No module named" in text:
        return "install tulle and PyTorch into this Python"
    if "refused" in text or "connectFullMesh" in text or "timed out" in text.lower():
        return "open the ports between the hosts, and name the network interface: GLOO_SOCKET_IFNAME=eth0"
    return "mend what the traceback names; NCCL_DEBUG=INFO or TORCH_DISTRIBUTED_DEBUG=DETAIL say more"


def _as_json(checks: list[Check], measured: dict[int, dict[str, Any]], *, ok: bool) -> dict[str, object]:
    return {
        "ok": ok,
        "versions": versions(),
        "backends": backends(),
        "devices": devices(),
        "ranks": {str(rank): found for rank, found in measured.items()},
        "network": next((found["network"] for found in measured.values()), {}),
        "checks": [asdict(check if check.ok is False else replace(check, mend="")) for check in checks],
    }


def _print(checks: list[Check]) -> None:
    screen = console()
    for check in checks:
        mark, style = {True: ("✓", "green"), False: ("✗", "bold red"), None: ("–", "dim")}[check.ok]
        screen.print(Text.assemble((mark, style), f" {check.name:<12} ", check.detail))
        if check.ok is False:
            screen.print(Text.assemble(("  mend: ", "bold"), check.mend))
