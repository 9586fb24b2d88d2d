"""Summation over named dimensions: over split ones the sum between ranks stays pending until somebody needs it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from tulle.named.dims import Dim, Dims, as_dims, check_once, volume
from tulle.named.placed import Axes, Local, Placed, record, shared_scope

Over = Dim | Sequence[Dim] | None
Reduced = tuple[list[int], Dims, Axes]
"""Places of the dimensions that go, the dimensions that stay, and the axes that split those that go."""


def reduced(tensor: Placed, over: Over, what: str) -> Reduced:
    """What a reduction over some dimensions, by default all, takes away and leaves.

    Raises:
        ModelError: If the tensor does not have one of them, or one is named twice.
    """
    scope = shared_scope([tensor], what)
    over = over if over is None or isinstance(over, Dim) else as_dims(over)
    key = (reduced, tensor.dims, over)
    found: Reduced | None = scope.plans.get(key)
    if found is None:
        dims = tensor.dims if over is None else as_dims(over)
        places = [tensor.place(dim, what) for dim in dims]
        check_once(dims, f"{what} over")
        axes = {axis for dim in dims for axis in scope.axes_of(dim)}
        kept = tuple(dim for dim in tensor.dims if dim not in dims)
        found = scope.plans[key] = places, kept, tuple(sorted(axes))
    return found


def summed(tensor: Placed, over: Over) -> tuple[Local, Dims, Axes]:
    """The sum over some dimensions: this rank's part, its dimensions, and the axes over which it is pending."""
    return _collapsed(torch.sum, tensor, over)


def averaged(tensor: Placed, over: Over) -> tuple[Local, Dims, Axes]:
    """The mean over some dimensions, likewise; of this rank's part first, as half precision may not hold its sum."""
    if not (tensor.dtype.is_floating_point or tensor.dtype.is_complex):
        part, kept, pending = summed(tensor, over)
        return part * (volume(kept) / volume(tensor.dims)), kept, pending
    part, kept, pending = _collapsed(torch.mean, tensor, over)
    parts = math.prod(tensor.scope.parts_of(dim) for dim in tensor.dims if dim not in kept) if pending else 1
    return part if parts == 1 else part / parts, kept, pending


def _collapsed(function: Callable[..., Local], tensor: Placed, over: Over) -> tuple[Local, Dims, Axes]:
    places, kept, axes = reduced(tensor, over, function.__name__)
    if tensor.scope.trace is not None:
        record("sum", [tensor], tensor.dims, kept)
    pending = tuple(sorted({*tensor.pending, *axes})) if axes else tensor.pending
    return function(tensor.part, places) if places else tensor.part, kept, pending
