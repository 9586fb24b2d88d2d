"""`crowded`: processes that share processors and memory compute faster while some of them wait.

A profile is of all ranks at once, as replicas compute. Stages of a pipeline wait for each other, and those that
compute have meanwhile more of the machine than the profile says: by as much as was measured for each number of them.

Source: processor sharing, Kleinrock, *Time-shared systems: a theoretical treatment* (JACM 1967), with a measured curve.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from tulle.plan.plan import PIPE
from tulle.simulate import Step
from tulle.workload import Machine


@dataclass(frozen=True, slots=True)
class Crowding:
    """Which ranks of a mesh share a machine.

    Args:
        factors: What computation takes while 1, 2, .. of those that share a machine compute, by what it takes while
            all do.
        machines: Of each machine, how many of its ranks each stage has.
        home: Of each stage, the machine of its first rank.
    """

    factors: tuple[float, ...]
    machines: tuple[Mapping[int, int], ...]
    home: tuple[int, ...]

    @staticmethod
    def of(machine: Machine, mesh: Mapping[str, int]) -> Crowding | None:
        """None where no stage has a neighbour that may wait while it computes."""
        if not machine.crowding or mesh.get(PIPE, 1) == 1:
            return None
        return _crowding(machine.crowding, tuple(mesh.items()))

    @property
    def least(self) -> float:
        """Of what it takes while all compute, what it takes at least: while one stage's ranks compute alone."""
        return min(self.factors[self.machines[self.home[stage]][stage] - 1] for stage in range(len(self.home)))

    @property
    def least_mean(self) -> float:
        """Of what all ranks have to do, on average, what a step takes at least: they share what a machine gives."""
        return min(min(self._paces(sum(ranks.values()))) * sum(ranks.values()) for ranks in self.machines)

    def _paces(self, most: int) -> list[float]:
        """What 1, 2, .. ranks at once take for a second of one rank's work."""
        return [factor / ranks for ranks, factor in enumerate(self.factors[:most], start=1)]


@lru_cache(maxsize=256)
def _crowding(factors: tuple[float, ...], axes: tuple[tuple[str, int], ...]) -> Crowding | None:
    step = Step(dict(axes), ())
    machines: list[Counter[int]] = [Counter() for _ in range(-(-step.ranks // len(factors)))]
    for rank in range(step.ranks):
        machines[rank // len(factors)][step.coordinates(rank)[0]] += 1
    if all(len(stages) == 1 for stages in machines):
        return None
    home = tuple(step.rank_at(stage) // len(factors) for stage in range(step.shape[0]))
    return Crowding(factors, tuple(machines), home)


def crowded(step: Step, crowding: Crowding) -> Step:
    """The step with shorter tasks where ranks that share a machine wait.

    Args:
        step: All of whose tasks are of some stage, with what they take while all ranks compute.
        crowding: Who shares what.
    """
    seconds = _Play(step, crowding).seconds()
    tasks = (replace(task, seconds=taken_s) for task, taken_s in zip(step.tasks, seconds, strict=True))
    return Step(step.mesh, tuple(tasks))


@dataclass(slots=True)
class _Play:
    """Events in the order of time: what a machine gives changes whenever one of its ranks begins or ends something."""

    step: Step
    crowding: Crowding
    _now_s: float = 0.0
    _computing: dict[int, float] = field(default_factory=dict)
    """Seconds that are left of tasks of devices, as if all ranks computed."""
    _sending: list[tuple[float, int]] = field(default_factory=list)
    """When tasks of links end, the first one first."""
    _busy: list[int] = field(init=False)
    """Of each machine, how many ranks compute."""

    def __post_init__(self) -> None:
        self._busy = [0] * len(self.crowding.machines)

    def seconds(self) -> list[float]:
        """How long each task takes beside the others that run at the same time."""
        followers, waits_for = _order(self.step)
        seconds = [0.0] * len(waits_for)
        ready = [number for number, count in enumerate(waits_for) if not count]
        while ready or self._computing or self._sending:
            for number in ready:
                seconds[number] = -self._now_s
                self._begin(number)
            ready = []
            for number in self._ended():
                seconds[number] += self._now_s
                for follower in followers[number]:
                    waits_for[follower] -= 1
                    if not waits_for[follower]:
                        ready.append(follower)
        return seconds

    def _begin(self, number: int) -> None:
        task = self.step.tasks[number]
        if task.resource == "link":
            heapq.heappush(self._sending, (self._now_s + task.seconds, number))
        else:
            self._computing[number] = task.seconds
            self._count(number, 1)

    def _ended(self) -> list[int]:
        """Go on to when something ends."""
        factors = {number: self._factor(number) for number in self._computing}
        ends_s = {number: self._now_s + left_s * factors[number] for number, left_s in self._computing.items()}
        next_s = min([*ends_s.values(), *(end_s for end_s, _ in self._sending[:1])])
        for number, factor in factors.items():
            self._computing[number] -= (next_s - self._now_s) / factor
        ended = [number for number, end_s in ends_s.items() if end_s <= next_s]
        for number in ended:
            del self._computing[number]
            self._count(number, -1)
        while self._sending and self._sending[0][0] <= next_s:
            ended.append(heapq.heappop(self._sending)[1])
        self._now_s = next_s
        return ended

    def _factor(self, number: int) -> float:
        return self.crowding.factors[self._busy[self.crowding.home[self._stage(number)]] - 1]

    def _count(self, number: int, by: int) -> None:
        stage = self._stage(number)
        for machine, ranks in enumerate(self.crowding.machines):
            self._busy[machine] += by * ranks.get(stage, 0)

    def _stage(self, number: int) -> int:
        stage = self.step.tasks[number].stage
        assert stage is not None, "tasks of a pipeline are each of a stage"
        return stage


def _order(step: Step) -> tuple[Sequence[Sequence[int]], list[int]]:
    """Which tasks wait for each, and for how many each waits; a rank does what is on a resource in list order."""
    followers: list[list[int]] = [[] for _ in step.tasks]
    waits_for: list[int] = []
    last: dict[object, int] = {}
    for number, task in enumerate(step.tasks):
        place = task.stage, task.resource
        before = {*task.after, last[place]} if place in last else {*task.after}
        last[place] = number
        waits_for.append(len(before))
        for one in before:
            followers[one].append(number)
    return followers, waits_for
