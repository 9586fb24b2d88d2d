"""`Task` and `Step`: what a rank does in one training step, as a list in the one order that all ranks obey.

index  task                resource  after    rank of stage 0      rank of stage 1
0      forward 0 (stage 0) device             F0
1      send 0 (stage 0)    link      0           ->
2      forward 0 (stage 1) device    1                             F0
3      backward 0 (stage 1) device   2                             B0
4      send 0 (stage 1)    link      3                          <-
5      backward 0 (stage 0) device   4               B0
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from tulle.errors import PlanError

AXES = ("pipe", "data", "model")
"""The axes that a simulated mesh can have; arrays over its ranks have their sizes, in this order."""
Resource = Literal["device", "link"]
RESOURCES: tuple[Resource, ...] = get_args(Resource)


@dataclass(frozen=True, slots=True)
class Task:
    """Something that occupies a rank's device or its link for a while.

    Args:
        name: For people: "forward encoder.0", "all-reduce bucket 3".
        resource: `"device"` or `"link"`; on one rank tasks of a resource run one at a time, in list order.
        seconds: How long it takes without noise.
        after: Indices of earlier tasks that must have ended: on this rank or, if they are of another stage, on that
            stage's rank with the same coordinates on the other axes.
        after_last: The same in the step before, at any place of the list. A step with such tasks begins on a rank as
            soon as its device is free; one without, when all that the rank did is done.
        stage: Runs on ranks of this coordinate of axis `pipe` only; None: on all ranks.
        axis: A collective, which begins on all ranks of a group along this axis when the last of them has come.
        sent_bytes: Sent by the rank that sends most.
        kind: What it is for: compute, dense, sparse, rows, model, pipe or update, say.
        micro_batch: Which it belongs to, if to one.
    """

    name: str
    resource: Resource
    seconds: float
    after: tuple[int, ...] = ()
    after_last: tuple[int, ...] = ()
    stage: int | None = None
    axis: str | None = None
    sent_bytes: int = 0
    kind: str = "compute"
    micro_batch: int | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """One training step, as the ranks of a mesh run it.

    Args:
        mesh: Size of each axis by name, the slowest-varying first, as `tulle.init` takes it.
        tasks: In the order in which a rank that takes part begins those of one resource.

    Raises:
        PlanError: If a task waits for what is not before it, or runs where nothing is.

    Example:
        >>> backward = Task("backward", "device", 0.010)
        >>> reduced = Task("all-reduce", "link", 0.004, after=(0,), axis="data", kind="dense")
        >>> update = Task("update", "device", 0.001, after=(1,), kind="update")
        >>> Step({"data": 300, "model": 4}, (backward, reduced, update)).ranks
        1200
    """

    mesh: Mapping[str, int]
    tasks: tuple[Task, ...]
    is_carried_over: bool = field(init=False)
    """Whether a step may begin while links still work for the one before."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "is_carried_over", any(task.after_last for task in self.tasks))
        unknown = [name for name in self.mesh if name not in AXES]
        if unknown:
            raise PlanError(f"a simulated mesh has the axes {', '.join(AXES)}; {unknown[0]!r} is none of them")
        for name, size in self.mesh.items():
            if size < 1:
                raise PlanError(f"a simulated mesh has {name}={size}, expected a positive number of ranks")
        for index, task in enumerate(self.tasks):
            _check(task, index, self)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Ranks along pipe, data and model."""
        return self.mesh.get("pipe", 1), self.mesh.get("data", 1), self.mesh.get("model", 1)

    @property
    def ranks(self) -> int:
        """Of the whole mesh."""
        return math.prod(self.shape)

    def coordinates(self, rank: int) -> tuple[int, int, int]:
        """Of a rank along pipe, data and model."""
        places: dict[str, int] = {}
        for name, size in reversed(tuple(self.mesh.items())):
            rank, places[name] = divmod(rank, size)
        pipe, data, model = (places.get(name, 0) for name in AXES)
        return pipe, data, model

    def rank_at(self, pipe: int, data: int = 0, model: int = 0) -> int:
        """The rank that has these coordinates.

        Example:
            >>> step = Step({"pipe": 2, "data": 300, "model": 4}, ())
            >>> step.rank_at(1), step.rank_at(*step.coordinates(1199))
            (1200, 1199)
        """
        places: dict[str, int] = dict(zip(AXES, (pipe, data, model), strict=True))
        rank = 0
        for name, size in self.mesh.items():
            rank = rank * size + places[name]
        return rank


def _check(task: Task, index: int, step: Step) -> None:
    late = [other for other in task.after if not 0 <= other < index]
    late += [other for other in task.after_last if not 0 <= other < len(step.tasks)]
    if late:
        raise PlanError(
            f"task {index} ({task.name!r}) waits for task {late[0]}: in the same step it can wait for earlier ones, "
            f"in the step before for one of its {len(step.tasks)}"
        )
    if task.resource not in RESOURCES:
        raise PlanError(f"task {index} ({task.name!r}) needs the resource {task.resource!r}: {' or '.join(RESOURCES)}")
    if task.stage is not None and not 0 <= task.stage < step.shape[0]:
        raise PlanError(f"task {index} ({task.name!r}) is of stage {task.stage}, axis pipe has {step.shape[0]} ranks")
    if task.axis is not None and task.axis not in AXES:
        raise PlanError(f"task {index} ({task.name!r}) is a collective of axis {task.axis!r}: {', '.join(AXES)}")
    if not 0 <= task.seconds < math.inf:
        raise PlanError(f"task {index} ({task.name!r}) takes {task.seconds} s: a finite time is needed")
