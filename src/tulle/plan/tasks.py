"""`Tasks`: the list of a step's tasks while it is written, for the rank of one stage at a time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from tulle.cost import NOTHING, Cost
from tulle.plan.plan import MODEL
from tulle.simulate import Task


@dataclass(slots=True)
class Tasks:
    """Tasks in the one order; each is known by its index.

    Args:
        pipe: Ranks of axis `pipe`; with one, tasks are of no stage.
    """

    pipe: int
    tasks: list[Task] = field(default_factory=list)

    def compute(
        self, name: str, seconds: float, after: Iterable[int] = (), *, stage: int | None = None, kind: str = "compute"
    ) -> int:
        """Something that the device does; its index."""
        return self._add(Task(name, "device", seconds, tuple(after), stage=self._place(stage), kind=kind))

    def send(
        self,
        name: str,
        cost: Cost,
        after: Iterable[int] = (),
        *,
        stage: int | None = None,
        axis: str | None,
        kind: str,
    ) -> int:
        """Something that the link does, a collective if it has an axis; its index."""
        place = self._place(stage)
        return self._add(Task(name, "link", cost.seconds, tuple(after), (), place, axis, cost.bytes, kind))

    def wait_for_last(self, index: int, earlier: Sequence[int]) -> None:
        """Have a task wait for others of the step before."""
        self.tasks[index] = replace(self.tasks[index], after_last=tuple(earlier))

    def _place(self, stage: int | None) -> int | None:
        return None if stage is None or self.pipe == 1 else stage % self.pipe

    def _add(self, task: Task) -> int:
        self.tasks.append(task)
        return len(self.tasks) - 1


@dataclass(slots=True)
class Run:
    """Pieces that a device works on one after the other, written as one task as far as nothing comes between.

    Args:
        tasks: Where it is written.
        stage: Of all pieces.
        verb: `"forward"` or `"backward"`.
        label: What the tasks' names end with.
        waits: What the first task waits for.
        is_coarse: Whether sums over axis `model` are written as one, at the end: of all micro-batches but the first and
            the last that is precise enough.
    """

    tasks: Tasks
    stage: int
    verb: str
    label: str
    waits: list[int]
    is_coarse: bool = False
    last: int | None = None
    """Index of the last task of the device that was written."""
    _names: list[str] = field(default_factory=list)
    _seconds: float = 0.0
    _summed: Cost = NOTHING

    def add(self, name: str, seconds: float, waits: Sequence[int] = ()) -> None:
        """A piece, which waits for some tasks."""
        if waits and self._names:
            self.write()
        self.waits += waits
        self._names.append(name)
        self._seconds += seconds

    def write(self) -> list[int]:
        """Write what there is; the index of the last task, to wait for."""
        if self._names:
            ends = self._names[0] if len(self._names) == 1 else f"{self._names[0]} .. {self._names[-1]}"
            name = f"{self.verb} {ends}{self.label}"
            self.last = self.tasks.compute(name, self._seconds, self.waits, stage=self.stage)
            self.waits, self._names, self._seconds = [], [], 0.0
        return [] if self.last is None else [self.last]

    def reached(self) -> list[int]:
        """Write what there is; what ends when the device has come to the next piece."""
        return [*self.write(), *self.waits]

    def sum_up(self, name: str, cost: Cost) -> None:
        """What the last piece made is summed over axis `model`."""
        if self.is_coarse:
            self._summed += cost
        elif cost.seconds:
            self.interrupt(name, cost, axis=MODEL, kind="model")

    def end(self) -> list[int]:
        """Write the rest; the index of what ends last."""
        if self._summed.seconds:
            self.interrupt("exchanges", self._summed, axis=MODEL, kind="model")
        after = self.write()
        return self.waits or after

    def interrupt(self, name: str, cost: Cost, *, axis: str, kind: str) -> None:
        """Something is sent that the next piece waits for."""
        after = self.write()
        self.waits = [*self.waits, self.tasks.send(name, cost, after, stage=self.stage, axis=axis, kind=kind)]
