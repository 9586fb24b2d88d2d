"""What binds a plan, and what would change the choice: other numbers of ranks, other bandwidths, more memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from tulle.cost import Network
from tulle.errors import PlanError
from tulle.memory.options import HOST
from tulle.plan.plan import AT_READ, Plan
from tulle.plan.prediction import ms, some
from tulle.plan.work import DATA
from tulle.simulate import Forecast
from tulle.workload import Cluster

KINDS = {
    "dense": "dense gradients on axis data",
    "sparse": "gradients of tables on axis data",
    "rows": "rows of split tables on axis data",
    "model": "sums over axis model",
    "pipe": "values between stages",
    "": "the pipeline's bubble",
}
"""What a device waits for, by kind of task."""
FURTHEST_RANKS, FURTHEST_BANDWIDTH = 4, 16
"""So many times as many ranks, and so many times as fast or slow a network, are looked at."""
MOST_SIZES = 8
"""Of clusters that are larger, and of smaller ones."""

Planner = Callable[[Cluster], Plan]
"""From a cluster to the best plan for it."""
_NOTHING_TO_CHOOSE = ""
"""Where no mesh of so many ranks has the axes that are fixed, or a replica would have no sample."""


class MemoryLackedError(PlanError):
    """No plan fits in memory."""


def binding(forecast: Forecast) -> str:
    """Which limit keeps a step from being faster: what the largest part of it goes to.

    Args:
        forecast: Of the step.
    """
    standing = forecast.standing_by_kind
    parts = {"computation": forecast.device_s} | {KINDS.get(kind, kind): s for kind, s in standing.items()}
    name, seconds = max(parts.items(), key=lambda part: part[1])
    what = "" if name == "computation" else ", for which the device waits"
    return f"{name}{what}: {ms(seconds)}, {seconds / forecast.step_s:.0%} of the step"


def parts_of(forecast: Forecast) -> dict[str, float]:
    """Where the seconds of a step go, mean over ranks, in the parts that a report of a run has."""
    stages = forecast.step.shape[0]
    found: dict[str, float] = {name: 0.0 for name in ("forward", "backward", "waiting", "optimizer", "other")}
    for task in forecast.step.tasks:
        if task.resource == "device":
            word = task.name.split()[0]
            found[{"update": "optimizer", "rest": "other"}.get(word, word)] += task.seconds / (
                1 if task.stage is None else stages
            )
    found["waiting"] = max(0.0, forecast.step_s - sum(found.values()))
    return found


def links_of(forecast: Forecast) -> dict[str, float]:
    """Seconds that links are busy, by kind of traffic."""
    kinds = {task.kind for task in forecast.step.tasks if task.resource == "link"}
    return {kind: seconds for kind, seconds in forecast.by_kind.items() if kind in kinds}


def explained(plan: Plan, cluster: Cluster, planner: Planner, *, memory_bytes: int | None = None) -> Plan:
    """The same plan with what would change the choice, found by choosing again on other clusters.

    Args:
        plan: The best plan for the cluster, with a prediction.
        cluster: For which it was made.
        planner: Makes the best plan for another cluster, in the same space and with as many samples a rank.
        memory_bytes: The limit under which it was made, if there was one.

    Raises:
        PlanError: If the plan has no prediction.
    """
    if plan.prediction is None:
        raise PlanError("the plan has no prediction that could be explained: make it with best_plan or tulle plan")
    found = [*_by_ranks(plan, cluster, planner), *_by_bandwidth(plan, cluster, planner)]
    binds = plan.prediction.binding
    if memory_bytes is not None:
        free = planner(replace(cluster, machine=replace(cluster.machine, memory_bytes=None)))
        if free.prediction and free.prediction.step_s < 0.99 * plan.prediction.step_s:
            binds = f"memory: without a limit a step would take {ms(free.prediction.step_s)}, with {_told(plan, free)}"
    return replace(plan, prediction=replace(plan.prediction, changes=tuple(found), binding=binds))


def differences(before: Plan, after: Plan, *, has_other_ranks: bool = False) -> list[str]:
    """What another plan does instead, in words; sizes of buckets and exact cuts left out.

    Args:
        before: A plan.
        after: The other one.
        has_other_ranks: Whether that is for another number of them, so that axes have other sizes in any case.

    Example:
        >>> differences(Plan({"data": 4}), Plan({"pipe": 2, "data": 2}, micro_batches=8))
        ['mesh pipe=2, data=2 instead of data=4', '8 micro-batches instead of 1']
    """
    found: list[str] = []
    used = [{name for name, size in plan.mesh.items() if size > 1} for plan in (before, after)]
    if used[0] != used[1] if has_other_ranks else dict(before.mesh) != dict(after.mesh):
        found.append(f"mesh {_axes(after.mesh)} instead of {_axes(before.mesh)}")
    if before.micro_batches != after.micro_batches and not has_other_ranks:
        several = "micro-batch" if after.micro_batches == 1 else "micro-batches"
        found.append(f"{after.micro_batches} {several} instead of {before.micro_batches}")
    if before.schedule != after.schedule:
        found.append(f"updates {'when read' if after.schedule == AT_READ else 'in the step'}")
    if before.memory.shard_optimizer != after.memory.shard_optimizer:
        found.append(f"optimizer state {'shared out' if after.memory.shard_optimizer else 'whole on every rank'}")
    if before.memory.full_shard != after.memory.full_shard:
        where = "shared out within each host" if after.memory.full_shard == HOST else "shared out"
        found.append(f"parameters {where if after.memory.full_shard else 'whole on every rank'}")
    if bool(before.memory.recompute) != bool(after.memory.recompute):
        found.append("activations recomputed" if after.memory.recompute else "activations kept")
    return found + _rerouted(before, after)


def _rerouted(before: Plan, after: Plan) -> list[str]:
    """Tables that go another way, those with the same change together; of one replica none goes anywhere."""
    if 1 in (before.mesh.get(DATA, 1), after.mesh.get(DATA, 1)):
        return []
    changed: dict[tuple[str, str], list[str]] = {}
    for name in dict.fromkeys([*before.schemes, *after.schemes]):
        pair = before.schemes.get(name, "a replica"), after.schemes.get(name, "a replica")
        if pair[0] != pair[1]:
            changed.setdefault(pair, []).append(name)
    return [f"{new} instead of {old} for {some(names)}" for (old, new), names in changed.items()]


@dataclass(frozen=True, slots=True)
class _Point:
    """A cluster that is looked at."""

    cluster: Cluster
    name: str


def _by_ranks(plan: Plan, cluster: Cluster, planner: Planner) -> Iterator[str]:
    """With more and with fewer ranks, the first number at which the choice is another one."""
    more, fewer = range(cluster.ranks + 1, FURTHEST_RANKS * cluster.ranks + 1), range(cluster.ranks - 1, 1, -1)
    for numbers, word in ((more, "from {} ranks on"), (fewer, "with {} ranks or fewer")):
        sizes = [size for number in _thinned(numbers) if (size := with_ranks(cluster, number)) is not None]
        points = [_Point(size, word.format(size.ranks)) for size in sizes]
        yield from _first_change(plan, points, planner)


def _by_bandwidth(plan: Plan, cluster: Cluster, planner: Planner) -> Iterator[str]:
    """With a faster and with a slower network, the first at which the choice is another one."""
    for is_faster in (True, False):
        points: list[_Point] = []
        factor = 2.0
        while factor <= FURTHEST_BANDWIDTH:
            other = with_bandwidth(cluster, factor if is_faster else 1 / factor)
            bits = 8 * (other.across.bandwidth_bytes_per_s if other.hosts > 1 else _inside(other).bandwidth_bytes_per_s)
            rate = f"{bits / 1e9:.3g} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.3g} Mbit/s"
            points.append(_Point(other, f"at {rate} {'and more' if is_faster else 'and less'}"))
            factor *= 2
        yield from _first_change(plan, points, planner)


def _first_change(plan: Plan, points: list[_Point], planner: Planner) -> Iterator[str]:
    """The first point at which the choice is another one; none if it is the same at the last, which is looked at first.

    Where links are slow, or ranks many, planning takes longest, and mostly nothing changes.
    """
    last = None
    while points and (last := _change(plan, points[-1], planner)) == _NOTHING_TO_CHOOSE:
        points.pop()
    for point in points if last else ():
        change = last if point is points[-1] else _change(plan, point, planner)
        if change:
            yield f"{point.name}: {change}"
            return


def _change(plan: Plan, point: _Point, planner: Planner) -> str | None:
    """What the choice would be instead, or None if it is the same."""
    try:
        other = planner(point.cluster)
    except MemoryLackedError:
        return "no plan fits in memory"
    except PlanError:
        return _NOTHING_TO_CHOOSE
    has_other_ranks = point.cluster.ranks != math.prod(plan.mesh.values())
    return "; ".join(differences(plan, other, has_other_ranks=has_other_ranks)) or None


def with_ranks(cluster: Cluster, ranks: int) -> Cluster | None:
    """The same kind of cluster with other hosts, or other processes on its one host; None if hosts would differ."""
    if cluster.hosts == 1:
        return replace(cluster, processes_per_host=ranks)
    hosts, rest = divmod(ranks, cluster.processes_per_host)
    return replace(cluster, hosts=hosts) if hosts and not rest else None


def with_bandwidth(cluster: Cluster, factor: float) -> Cluster:
    """The same cluster with another network between its hosts, or on its one host."""
    if cluster.hosts > 1:
        return replace(cluster, across=cluster.across.faster(factor))
    return replace(cluster, across=cluster.across.faster(factor), inside=_inside(cluster).faster(factor))


def _inside(cluster: Cluster) -> Network:
    return cluster.inside or cluster.across


def _thinned(numbers: range) -> list[int]:
    """All numbers if they are few; else each about as much further as the last was."""
    if len(numbers) <= MOST_SIZES:
        return [*numbers]
    first, last = numbers[0], numbers[-1]
    ratio = (last / first) ** (1 / (MOST_SIZES - 1))
    return [*dict.fromkeys(round(first * ratio**power) for power in range(MOST_SIZES))]


def _told(before: Plan, after: Plan) -> str:
    return "; ".join(differences(before, after)) or "other buckets or cuts"


def _axes(mesh: Mapping[str, int]) -> str:
    return ", ".join(f"{name}={size}" for name, size in mesh.items())
