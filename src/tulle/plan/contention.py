"""`contended`: computation and exchanges that run beside each other take longer, by as much as was measured.

On a CPU both need the same cores and memory; on a GPU a collective takes some of its processors. How long two things
run beside each other is that of the step in which they do not disturb each other.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from tulle.simulate import Span, Step, Task, run
from tulle.workload import Machine

OTHER = {"device": "link", "link": "device"}


def contended(step: Step, machine: Machine) -> Step:
    """The step with longer tasks where device and link work at a time.

    Args:
        step: As it would be if they did not disturb each other.
        machine: By how much they do.
    """
    factors = {"device": machine.slowdown - 1, "link": machine.link_slowdown - 1}
    if not any(factors.values()):
        return step
    forecast = run(step)
    tasks: dict[int, Task] = {}
    for stage in range(step.shape[0]):
        numbers = [number for number, task in enumerate(step.tasks) if task.stage in (None, stage)]
        spans = forecast.timeline(step.rank_at(stage))
        busy = {name: _Busy([span for span in spans if span.task.resource == name]) for name in OTHER}
        for number, span in zip(numbers, spans, strict=True):
            beside_s = busy[OTHER[span.task.resource]].within(span.start_s, span.end_s)
            longer = replace(span.task, seconds=span.task.seconds + factors[span.task.resource] * beside_s)
            if number not in tasks or longer.seconds > tasks[number].seconds:
                tasks[number] = longer
    return Step(step.mesh, tuple(tasks[number] for number in range(len(step.tasks))))


class _Busy:
    """When a resource of a rank, its device or its link, is busy."""

    def __init__(self, spans: Sequence[Span]) -> None:
        kept = sorted((span.start_s, span.end_s) for span in spans if span.end_s > span.start_s)
        self._ends = [end for _, end in kept]
        self._starts = [start for start, _ in kept]
        self._before = [0.0, *accumulate(end - start for start, end in kept)]

    def within(self, start: float, end: float) -> float:
        """How many seconds it is busy between two moments."""
        return self._until(end) - self._until(start)

    def _until(self, moment: float) -> float:
        number = bisect_left(self._ends, moment)
        running = max(0.0, moment - self._starts[number]) if number < len(self._starts) else 0.0
        return self._before[number] + running
