"""`run`: discrete events of some training steps on a mesh, for all ranks at a time.

A rank's device and link are queues: what a rank does on one of them, it does in the order of the step's list. So the
events need no heap. In list order a task begins when its resource is free and what it waits for has ended, a collective
when that is so on the last rank of its group, and each of these times is an array over ranks:

    ready = max(free[resource], ends of the tasks that it is after)     [pipe, data, model]
    begin = ready, or its maximum along the axis of a collective
    free[resource] = end = begin + seconds * slowness of the rank

Where all replicas are alike, which they are without noise, the arrays are over the stages alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import islice
from statistics import median_low

import numpy as np

from tulle.errors import PlanError
from tulle.simulate.forecast import Forecast, Times
from tulle.simulate.noise import Array, Noise, Stragglers, slownesses
from tulle.simulate.task import AXES, RESOURCES, Step

_SETTLING_STEPS = 3
"""Steps that are carried over need so many until one is like the other."""


def run(
    step: Step,
    *,
    steps: int = 1,
    noise: Noise | None = None,
    stragglers: Stragglers | None = None,
    seed: int = 0,
) -> Forecast:
    """Simulate a training step on all ranks of its mesh.

    Args:
        step: What the ranks do.
        steps: How many steps are counted; with noise one differs from the other.
        noise: How much computation varies; None: not at all.
        stragglers: Which ranks are slow; None: none.
        seed: The same noise and stragglers for the same seed.

    Raises:
        PlanError: If no step is to be counted.

    Example:
        >>> from tulle.simulate import Step, Task
        >>> backward = Task("backward", "device", 0.010)
        >>> reduced = Task("all-reduce", "link", 0.004, after=(0,), axis="data", kind="dense")
        >>> update = Task("update", "device", 0.001, after=(1,), kind="update")
        >>> forecast = run(Step({"data": 300}, (backward, reduced, update)))
        >>> round(forecast.step_s, 6), round(forecast.exposed_s, 6)
        (0.015, 0.004)
    """
    if steps < 1:
        raise PlanError(f"simulate.run was given steps={steps}, expected a positive number of steps to count")

    def events() -> Iterator[Times]:
        if noise or stragglers:
            return _on_all_ranks(step, slownesses(step.shape, noise, stragglers, seed))
        return _on_stages(step)

    settling = _SETTLING_STEPS if step.is_carried_over else 0
    last_two: deque[Times] = deque(maxlen=2)
    steps_s: list[float] = []
    for times in islice(events(), settling + steps):
        last_two.append(times)
        steps_s.append(times.over_s - times.begin_s)
    counted = tuple(steps_s[settling:])
    typical = settling + counted.index(median_low(counted))
    if typical < len(steps_s) - 1:  # the times of all steps would fill the memory: the same once more up to that one
        last_two.extend(islice(events(), typical + 1))
    return Forecast(step, counted, last_two[-1], last_two[0] if typical else None)


def _on_stages(step: Step) -> Iterator[Times]:
    """One step after the other where all replicas are alike: times are lists over the stages."""
    places = range(step.shape[0])
    one = [(place,) for place in places]
    free = {resource: [0.0] * len(places) for resource in RESOURCES}
    ends: list[list[float]] = []
    begin_s = 0.0
    while True:
        starts, earlier, ends = [], ends, []
        for task in step.tasks:
            clock = free[task.resource]
            waits = [ends[index] for index in task.after]
            if earlier and task.after_last:
                waits += [earlier[index] for index in task.after_last]
            where = places if task.stage is None else one[task.stage]
            begin = [max(clock[place], *[wait[place] for wait in waits]) if waits else clock[place] for place in where]
            if task.axis == "pipe" and len(begin) > 1:
                begin = [max(begin)] * len(begin)
            starts.append(begin)
            for place, time_s in zip(where, begin, strict=True):
                clock[place] = time_s + task.seconds
            # Who is of another stage waits for the rank of this one.
            ends.append(clock[:] if task.stage is None else [clock[task.stage]] * len(places))
        over = free["device"] if step.is_carried_over else [max(both) for both in zip(*free.values(), strict=True)]
        yield Times(starts, ends, begin_s, max(over))
        begin_s = max(over)
        if not step.is_carried_over:
            free = {resource: over[:] for resource in RESOURCES}


def _on_all_ranks(step: Step, slowness: Iterator[Array | None]) -> Iterator[Times]:
    """One step after the other where each rank has its own pace: times are arrays over the ranks."""
    free = {resource: np.zeros(step.shape) for resource in RESOURCES}
    ends: list[Array] = []
    begin_s = 0.0
    while True:
        slower = next(slowness)
        starts, earlier, ends = [], ends, []
        for task in step.tasks:
            where = slice(None) if task.stage is None else slice(task.stage, task.stage + 1)
            begin = free[task.resource][where].copy()
            waits = [ends[index] for index in task.after]
            if earlier and task.after_last:
                waits += [earlier[index] for index in task.after_last]
            for wait in waits:
                begin = np.maximum(begin, wait if len(wait) == 1 else wait[where])
            if task.axis is not None:
                group_begin = begin.max(AXES.index(task.axis), keepdims=True)
                begin = np.broadcast_to(group_begin, begin.shape)
            if slower is None or task.resource == "link":
                end = begin + task.seconds
            else:
                end = begin + task.seconds * slower[where]
            starts.append(begin)
            ends.append(end)
            free[task.resource][where] = end
        over = free["device"] if step.is_carried_over else np.maximum(*free.values())
        yield Times(starts, ends, begin_s, float(over.max()))
        begin_s = float(over.max())
        if not step.is_carried_over:
            free = {resource: over.copy() for resource in RESOURCES}
