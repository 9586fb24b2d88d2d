"""`Forecast`: what came of a simulated step: how long it took, what took it, and when each rank did what."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median_low

import numpy as np

from tulle.simulate.noise import Array
from tulle.simulate.task import Step, Task


@dataclass(frozen=True, slots=True, eq=False)
class Times:
    """When the tasks of one step began and ended, in seconds from the begin of the first step.

    Args:
        starts: By task: `[stages]`, or `[stages, data, model]`; of a task of one stage that stage alone.
        ends: The same, but a task of one stage may fill all stages.
        begin_s: When the last rank was through with the step before.
        over_s: When it was with this one.
    """

    starts: Sequence[Sequence[float] | Array]
    ends: Sequence[Sequence[float] | Array]
    begin_s: float
    over_s: float


@dataclass(frozen=True, slots=True)
class Span:
    """A task on one rank, in seconds from the begin of the step."""

    task: Task
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, eq=False)
class Forecast:
    """What came of it. Times by kind, exposed and idle ones are means over all ranks.

    Args:
        step: What was simulated.
        steps_s: How long each of the steps took, from when the last rank was through to when it was again.
        last: When tasks ran in the step that took the median, up to which the others were simulated again.
        before: The same of the step before it, if there was one.
    """

    step: Step
    steps_s: tuple[float, ...]
    last: Times
    before: Times | None = None

    @property
    def step_s(self) -> float:
        """How long a step takes: the median, of an even number the lower one."""
        return median_low(self.steps_s)

    @property
    def is_even(self) -> bool:
        """Whether all replicas did the same at the same time."""
        return all(isinstance(end, list) for end in self.last.ends)

    @property
    def by_kind(self) -> dict[str, float]:
        """Seconds that tasks of a kind take of a rank, by kind; what runs on the link may run beside computation."""
        found: dict[str, float] = {}
        stages = self.step.shape[0]
        for task, start, end in zip(self.step.tasks, self.last.starts, self.last.ends, strict=True):
            share = 1 if task.stage is None else 1 / stages
            taken_s = float(np.mean(_own(end, start) - np.asarray(start)))
            found[task.kind] = found.get(task.kind, 0.0) + share * taken_s
        return found

    @property
    def device_s(self) -> float:
        """Seconds in which a rank computes."""
        return self.step_s - sum(self.standing_by_kind.values())

    @property
    def exposed_s(self) -> float:
        """Seconds in which a rank does not compute but communicates."""
        return sum(taken_s for kind, taken_s in self.standing_by_kind.items() if kind)

    @property
    def idle_s(self) -> float:
        """Seconds in which a rank does neither: the bubble of a pipeline, the wait for slower ranks."""
        return self.standing_by_kind.get("", 0.0)

    @property
    def standing_by_kind(self) -> dict[str, float]:
        """Seconds in which a rank does not compute, by the kind of what is on its link; "" where nothing is."""
        kinds = ["", *dict.fromkeys(task.kind for task in self.step.tasks if task.resource == "link")]
        stages = self.step.shape[0]
        standing_s = np.mean([self._standing_s(stage, kinds) for stage in range(stages)], axis=0).tolist()
        return {kind: taken_s for kind, taken_s in zip(kinds, standing_s, strict=True) if taken_s > 0 or kind}

    @property
    def sent_bytes(self) -> int:
        """Bytes that the rank that sends most sends."""
        tasks = self.step.tasks
        stages = range(self.step.shape[0])
        return max(sum(task.sent_bytes for task in tasks if task.stage in (None, stage)) for stage in stages)

    @property
    def computed_s(self) -> Array:
        """`[pipe, data, model]`: seconds that each rank computes, or `[pipe]` where replicas are alike."""
        found = np.zeros(self.step.shape[:1] if self.is_even else self.step.shape)
        for task, start, end in zip(self.step.tasks, self.last.starts, self.last.ends, strict=True):
            if task.resource == "device":
                here = slice(None) if task.stage is None else slice(task.stage, task.stage + 1)
                found[here] += _own(end, start) - np.asarray(start)
        return found

    def timeline(self, rank: int) -> list[Span]:
        """What a rank did in the step that took the median, in the order of the list.

        Example:
            >>> from tulle.simulate import Step, Task, run
            >>> tasks = Task("forward", "device", 0.25), Task("send", "link", 0.5, after=(0,), kind="pipe")
            >>> [(span.task.name, span.start_s, span.end_s) for span in run(Step({}, tasks)).timeline(0)]
            [('forward', 0.0, 0.25), ('send', 0.25, 0.75)]
        """
        stage, *replica = self.step.coordinates(rank)
        begin_s = self.last.begin_s
        return [
            Span(task, _of(start, replica) - begin_s, _of(end, replica) - begin_s)
            for task, start, end in self._of_stage(self.last, stage)
        ]

    def _of_stage(self, times: Times, stage: int) -> Iterator[tuple[Task, Array, Array]]:
        """The tasks of a stage with their times, each `[data, model]`, or a single number where replicas are alike."""
        for task, start, end in zip(self.step.tasks, times.starts, times.ends, strict=True):
            if task.stage in (None, stage):
                place = stage if task.stage is None else 0
                yield task, np.asarray(start)[place], _own(end, start)[place]

    def _standing_s(self, stage: int, kinds: Sequence[str]) -> Array:
        """`[kinds]`: seconds in which ranks of a stage do not compute, by what is on the link.

        What begins or ends on a rank is sorted, and between two such events its state does not change.
        """
        begin_s, end_s = self.last.begin_s, self.last.over_s
        moments: list[Array] = [np.array(begin_s), np.array(end_s)]
        link_changes, device_changes = [0, 0], [0, 0]
        for times in [self.before, self.last] if self.before else [self.last]:
            for task, start, end in self._of_stage(times, stage):
                moments += [start, end]
                kind = kinds.index(task.kind) if task.resource == "link" else 0
                link_changes += [kind, -kind]
                device_changes += [1, -1] if task.resource == "device" else [0, 0]
        replicas = np.broadcast_shapes(*(moment.shape for moment in moments))
        when = np.stack([np.broadcast_to(moment, replicas).ravel() for moment in moments]).clip(begin_s, end_s)
        order = when.argsort(0, kind="stable")
        lasting_s = np.diff(np.take_along_axis(when, order, 0), axis=0)
        on_link = np.array(link_changes)[order].cumsum(0)[:-1]
        is_standing = np.array(device_changes)[order].cumsum(0)[:-1] == 0
        standing_s = np.bincount(on_link[is_standing], lasting_s[is_standing], minlength=len(kinds))
        return standing_s / when.shape[1]


def _own(end: Sequence[float] | Array, start: Sequence[float] | Array) -> Array:
    """The ends of the stages that have starts."""
    return np.asarray(end)[: len(start)]


def _of(times_s: Array, replica: Sequence[int]) -> float:
    return float(times_s[tuple(replica)] if times_s.ndim else times_s)
