"""`Pass`: one call of a model, whose gradients leave unit by unit during backward and arrive at its end.

    forward     arrive 2, arrive 1, gather 1, compute 1, gather 2, compute 2
    backward    compute 2, send 2, compute 1, send 1, arrive 1, arrive 2

Of the nodes that it could run autograd takes the one that was made last. Those that wait for gradients are made before
all others, so everything else runs first; if not, in the first step say, only time is lost. All that autograd gives
(hooks of parameters, `torch.autograd.grad`, gradients that add up) is as ever.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from tulle.memory.leaving import Reduced
from tulle.memory.unit import Unit
from tulle.parts import locals_of

_numbers = count()
_running: ContextVar[Pass | None] = ContextVar("pass", default=None)


class Arrival:
    """Gradients of one unit's parts, under way: those of each of its calls, of one backward."""

    def __init__(self) -> None:
        self._jobs: list[Reduced] = []
        self._backward = -1

    def expect(self, job: Reduced) -> None:
        """Add gradients, of one more call, to those that are waited for; those of a backward that failed are not."""
        backward = torch._C._current_graph_task_id()
        if backward != self._backward:
            self._jobs, self._backward = [], backward
        self._jobs.append(job)

    def wait(self) -> list[Tensor | None]:
        """The sums of what was expected; None for what no rank has used."""
        jobs, self._jobs = self._jobs, []
        of_calls = zip(*(job.result() for job in jobs), strict=True)
        return [_sum([gradient for gradient in of_part if gradient is not None]) for of_part in of_calls]


class Pass:
    """One call of a model, or of the outermost unit in it.

    Args:
        expected: The units that were called within the last one, and their parts.
    """

    def __init__(self, expected: Mapping[Unit, Sequence[nn.Parameter]]) -> None:
        self.number = next(_numbers)
        self.called: dict[Unit, Sequence[nn.Parameter]] = {}
        """Units and their parts, so far."""
        self._views: dict[Unit, _Views] = {}
        if torch.is_grad_enabled():
            self._views |= {unit: _Views(parts) for unit, parts in expected.items()}

    def views(self, unit: Unit, parts: Sequence[nn.Parameter]) -> tuple[Arrival, Sequence[Tensor]]:
        """Of a unit's parts what is to be gathered, and by which way gradients come back."""
        self.called[unit] = parts
        views = self._views.get(unit)
        if views is None or any(a is not b for a, b in zip(views.parts, parts, strict=True)):
            views = _Views(parts)
            if torch.is_grad_enabled():
                self._views[unit] = views
        return views.arrival, views.views


@contextmanager
def in_pass(last: Mapping[Unit, Sequence[nn.Parameter]]) -> Iterator[tuple[Pass, bool]]:
    """The pass that is running, or a new one, and whether it is new."""
    running = _running.get()
    if running is not None:
        yield running, False
        return
    new = Pass(last)
    token = _running.set(new)
    try:
        yield new, True
    finally:
        _running.reset(token)


class _Arrive(torch.autograd.Function):
    """Parts as they are; what comes back is waited for."""

    @staticmethod
    def forward(ctx: Any, arrival: Arrival, *parts: Tensor) -> tuple[Tensor, ...]:
        ctx.arrival = arrival
        ctx.set_materialize_grads(False)
        given = tuple(locals_of(parts))
        ctx.mark_non_differentiable(*(g for g, p in zip(given, parts, strict=True) if not p.requires_grad))
        return given

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *_: object) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return (None, *ctx.arrival.wait())


class _Views:
    """Some parts as autograd is to see them."""

    def __init__(self, parts: Sequence[nn.Parameter]) -> None:
        self.parts, self.arrival = parts, Arrival()
        # As views: a function of parameters themselves is what a pipeline takes for an operation between its modules.
        with torch._C.DisableTorchFunctionSubclass():  # parts, which are guarded
            self.views: Sequence[Tensor] = _Arrive.apply(self.arrival, *(part.view_as(part) for part in parts))


def _sum(gradients: Sequence[Tensor]) -> Tensor | None:
    return sum(gradients[1:], start=gradients[0]) if gradients else None
