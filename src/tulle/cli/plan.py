"""`tulle plan`: from a profile, and what is said of a cluster, to the best plan for it, with its explanation."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from tulle.cli.console import waiting
from tulle.cli.units import (
    NUMBER,
    Bandwidth,
    Hosts,
    Latency,
    Lookahead,
    ProcessesPerHost,
    changed,
    tell_of_unknown_links,
)
from tulle.cli.usage import UsageError
from tulle.errors import PlanError
from tulle.plan import Plan, Space, best_plan, explained
from tulle.plan.exchange import Tariff
from tulle.plan.shelf import Shelf, key_of
from tulle.simulate import Change, another
from tulle.workload import Cluster, Profile

EXPLAINED_RANKS = 64
"""Of a larger cluster it is not looked into what would change the choice: each look is another plan."""
_PREFIXES = {"": 1, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_PREFIXES |= {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """What a plan is wanted for.

    Args:
        change: How the cluster differs from the one that was profiled.
        memory_bytes: What a rank may use; None for what its machine has.
        batch: Samples of a step, of all replicas; None for as many a rank as were profiled.
        mesh: Sizes of axes that are fixed.
        lookahead: Whether the loop goes through `tulle.lookahead`; None for what the profile saw.
    """

    change: Change
    memory_bytes: int | None = None
    batch: int | None = None
    mesh: tuple[tuple[str, int], ...] = ()
    lookahead: bool | None = None

    def plan(self, profile: Profile, *, is_anew: bool = False) -> Plan:
        """The best plan, explained; one that was made before for the same is taken again.

        Args:
            profile: Of the model.
            is_anew: Whether to make it anew whatever was made before.
        """
        profile = profile if self.lookahead is None else replace(profile, lookahead=self.lookahead)
        cluster = another(profile.cluster, self.change) if self.change != Change() else profile.cluster
        shelf = Shelf.of()
        key = key_of(profile, cluster, memory_bytes=self.memory_bytes, batch=self.batch, mesh=self.mesh)
        kept = None if is_anew else shelf.find(key)
        if kept is not None:
            return kept
        space = Space(mesh=dict(self.mesh))
        limit_bytes = cluster.machine.memory_bytes if self.memory_bytes is None else self.memory_bytes
        limited = replace(cluster, machine=replace(cluster.machine, memory_bytes=limit_bytes))
        a_rank = None if self.batch is None else self.batch / cluster.ranks
        tariff = Tariff(profile)
        found = best_plan(profile, limited, batch=self.batch, space=space, tariff=tariff)
        if cluster.ranks <= EXPLAINED_RANKS:
            again = partial(_again, profile, a_rank, space, {cluster.ranks: tariff})
            found = explained(found, limited, again, memory_bytes=limit_bytes)
        try:
            shelf.put(key, found)
        except OSError as error:  # a home that is read-only, say
            print(f"tulle: the plan is not kept for the next time: {error}", file=sys.stderr)
        return found


def _again(
    profile: Profile, a_rank: float | None, space: Space, tariffs: Mapping[int, Tariff], cluster: Cluster
) -> Plan:
    """The best plan for another cluster: of as many ranks gradients look the same, of others replicas are free."""
    if cluster.ranks not in tariffs:
        space = replace(space, mesh={name: size for name, size in space.mesh.items() if name != "data"})
    batch = None if a_rank is None else max(1, round(a_rank * cluster.ranks))
    return best_plan(profile, cluster, batch=batch, space=space, tariff=tariffs.get(cluster.ranks))


def plan(  # noqa: PLR0913 - typer makes each argument an option
    profile: Annotated[Path, typer.Argument(metavar="PROFILE", help="As tulle profile or Profile.save wrote it.")],
    hosts: Hosts = None,
    processes_per_host: ProcessesPerHost = None,
    bandwidth: Bandwidth = None,
    latency: Latency = None,
    memory: Annotated[str | None, typer.Option(metavar="SIZE", help="That a rank may use: 16GB, 512MiB.")] = None,
    batch: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Samples of a step. Default: as many a rank as profiled.")
    ] = None,
    mesh: Annotated[
        str | None, typer.Option(metavar="AXIS=N,...", help="Axes that are fixed: data=2,pipe=2. Others are free.")
    ] = None,
    lookahead: Lookahead = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", metavar="FILE", help="Save the plan there.")] = None,
    anew: Annotated[
        bool, typer.Option("--anew", metavar="", help="Make it anew, not as it was made before for the same.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", metavar="", help="Print the plan as one JSON object and nothing else.")
    ] = False,
) -> None:
    """Choose the fastest plan for a profiled model on a cluster, and say why it is that one.

    Example: tulle plan runs/demo/profile.json --hosts 8 --bandwidth 10Gbit --memory 16GB -o plan.json

    It says what was chosen, what the runner-up would take, what keeps the step from being faster, and what would
    change the choice. What is not given is as it was profiled. tulle run --plan FILE trains with it.
    """
    change = changed(hosts, processes_per_host, bandwidth, latency)
    limit_bytes = None if memory is None else size(memory)
    request = PlanRequest(change, limit_bytes, batch, () if mesh is None else axes(mesh), lookahead)
    measured = Profile.load(profile)
    tell_of_unknown_links(measured.cluster, [change])
    with waiting("looking for the fastest plan"):
        found = request.plan(measured, is_anew=anew)
    if output is not None:
        try:
            found.save(output, profile=profile, model=measured.model)
        except OSError as error:
            raise PlanError(f"the plan cannot be saved as {str(output)!r}: {error.strerror}") from error
    print(json.dumps(found.to_json()) if as_json else found.explain())


def size(text: str, option: str = "--memory") -> int:
    """Bytes.

    Raises:
        UsageError: If there is no unit, or it is not one of a size.

    Example:
        >>> size("16GB"), size("1.5 GiB"), size("64 KB")
        (16000000000, 1610612736, 64000)
    """
    found = re.fullmatch(NUMBER + r"([kKMGT]|[KMGT]i|)B", text.strip())
    found_bytes = float(found[1]) * _PREFIXES[found[2]] if found else 0.0
    if not 1 <= found_bytes < math.inf:
        raise UsageError(f"{option} {text!r} is no size, expected a number with its unit: 16GB, 512MiB")
    return round(found_bytes)


def axes(text: str, option: str = "--mesh") -> tuple[tuple[str, int], ...]:
    """Sizes of axes by name.

    Raises:
        UsageError: If they are not, or an axis is named twice.

    Example:
        >>> axes("data=2,pipe=4")
        (('data', 2), ('pipe', 4))
    """
    if not re.fullmatch(r"(data|pipe|model)=[1-9]\d*(,(data|pipe|model)=[1-9]\d*)*", text):
        raise UsageError(f"{option} {text!r}: expected AXIS=N,... with the axes data, pipe and model")
    pairs = [one.partition("=") for one in text.split(",")]
    if len({name for name, _, _ in pairs}) < len(pairs):
        raise UsageError(f"{option} {text!r} names an axis twice")
    return tuple((name, int(number)) for name, _, number in pairs)
