"""The timeline of a simulated step, as chrome://tracing and ui.perfetto.dev read it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tulle.simulate.forecast import Forecast, Span
from tulle.simulate.task import RESOURCES

_LONG_S = 1e-9
"""Nobody sees what is shorter."""


def trace(forecast: Forecast, ranks: Sequence[int]) -> dict[str, Any]:
    """What some ranks did in one step: a process for each, in it a thread for its device and one for its link.

    Time 0 is when the first of them began.

    Example:
        >>> from tulle.simulate import Step, Task, run
        >>> events = trace(run(Step({}, (Task("forward", "device", 0.25),))), [0])["traceEvents"]
        >>> [(event["name"], event["ts"], event["dur"]) for event in events if event["ph"] == "X"]
        [('forward', 0.0, 250000.0)]
    """
    names: list[dict[str, Any]] = []
    events: list[dict[str, Any]] = []
    spans = {rank: [span for span in forecast.timeline(rank) if span.end_s - span.start_s > _LONG_S] for rank in ranks}
    begin_s = min((span.start_s for of_rank in spans.values() for span in of_rank), default=0.0)
    for rank in ranks:
        names.append(_name(rank, 0, "process_name", f"rank {rank}, simulated"))
        names += [_name(rank, thread, "thread_name", resource) for thread, resource in enumerate(RESOURCES)]
        events += [_event(rank, span, begin_s) for span in spans[rank]]
    events.sort(key=lambda event: (event["ts"], event["pid"]))
    return {"traceEvents": names + events, "displayTimeUnit": "ms"}


def telling_ranks(forecast: Forecast) -> list[int]:
    """The ranks whose timelines tell most: the first of each stage, and the one that computes longest."""
    step = forecast.step
    first = {step.rank_at(stage) for stage in range(step.shape[0])}
    if forecast.is_even:
        return sorted(first)
    slowest = np.unravel_index(forecast.computed_s.argmax(), step.shape)
    return sorted({*first, step.rank_at(*map(int, slowest))})


def _name(rank: int, thread: int, what: str, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": rank, "tid": thread, "ts": 0, "name": what, "args": {"name": name}}


def _event(rank: int, span: Span, begin_s: float) -> dict[str, Any]:
    task = span.task
    arguments = {"kind": task.kind, "sent_bytes": task.sent_bytes, "micro_batch": task.micro_batch}
    return {
        "name": task.name,
        "cat": task.kind,
        "ph": "X",
        "pid": rank,
        "tid": RESOURCES.index(task.resource),
        "ts": (span.start_s - begin_s) * 1e6,
        "dur": (span.end_s - span.start_s) * 1e6,
        "args": {name: value for name, value in arguments.items() if value is not None},
    }
