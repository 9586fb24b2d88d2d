"""Reductions over named dimensions, split or not: sums, means, extrema, softmax and cumulative sums."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, cast

import torch

from tulle.named.dims import Dim
from tulle.named.placed import Local, label_of, record
from tulle.named.summation import Over, reduced
from tulle.named.tensor import Tensor, elementwise


def sum(tensor: Tensor, over: Over = None) -> Tensor:
    """Sum over some dimensions, by default all. Over split ones the sum between ranks stays pending until it is needed.

    Example:
        >>> import torch
        >>> from tulle import named as tn
        >>> batch, d = tn.dims(batch=2, d=3)
        >>> tn.sum(tn.from_torch(torch.ones(2, 3), (batch, d)), d).local.tolist()
        [3.0, 3.0]
    """
    return tensor.sum(over)


def mean(tensor: Tensor, over: Over = None) -> Tensor:
    """Mean over some dimensions, by default all."""
    return tensor.mean(over)


def max(tensor: Tensor, over: Over = None) -> Tensor:
    """Largest value over some dimensions, by default all; the gradient goes to where it is, in equal shares."""
    return _extremum(tensor, over, "max")


def min(tensor: Tensor, over: Over = None) -> Tensor:
    """Smallest value over some dimensions, by default all; the gradient goes to where it is, in equal shares."""
    return _extremum(tensor, over, "min")


def logsumexp(tensor: Tensor, over: Over = None) -> Tensor:
    """Logarithm of the sum of exponentials over some dimensions, by default all."""
    tensor = _floating(tensor)
    places, kept, axes = reduced(tensor, over, "logsumexp")
    if not axes and tensor.scope.trace is None:
        return Tensor(torch.logsumexp(tensor.local, places) if places else tensor.local, kept)
    largest = max(tensor.detach(), over).map(lambda local: local.masked_fill(~local.isfinite(), 0))
    total = sum(elementwise(torch.sub, tensor, largest).map(torch.exp), over)
    return total.map(torch.log) + largest


def softmax(tensor: Tensor, over: Dim | Sequence[Dim]) -> Tensor:
    """Exponentials over a dimension, or over several together, scaled to add up to 1.

    Example:
        >>> import torch
        >>> from tulle import named as tn
        >>> height, width = tn.dims(height=2, width=2)
        >>> tn.softmax(tn.from_torch(torch.zeros(2, 2), (height, width)), (height, width)).local.tolist()
        [[0.25, 0.25], [0.25, 0.25]]
    """
    tensor = _floating(tensor)
    places, _, axes = reduced(tensor, over, "softmax")
    if places and not axes and tensor.scope.trace is None:
        return tensor.with_part(_along(torch.softmax, places, tensor.local))
    exponentials = _below_largest(tensor, over).map(torch.exp)
    return exponentials / sum(exponentials, over)


def softmax_or_zeros(tensor: Tensor, over: Dim) -> Tensor:
    """Softmax, but zeros instead of NaN where all is minus infinity, as torch's fused attention has it."""
    if tensor.scope.is_whole(over):
        safe_softmax = vars(torch)["_safe_softmax"]  # not exported
        return tensor.with_part(safe_softmax(tensor.local, tensor.place(over, "softmax")))
    exponentials = _below_largest(tensor, over).map(torch.exp)
    total = sum(exponentials, over)
    return exponentials / elementwise(torch.where, total > 0, total, 1.0)


def log_softmax(tensor: Tensor, over: Dim | Sequence[Dim]) -> Tensor:
    """Logarithm of the softmax."""
    tensor = _floating(tensor)
    places, _, axes = reduced(tensor, over, "log_softmax")
    if places and not axes and tensor.scope.trace is None:
        return tensor.with_part(_along(torch.log_softmax, places, tensor.local))
    below = _below_largest(tensor, over)
    return below - sum(below.map(torch.exp), over).map(torch.log)


def _along(function: Callable[[Local, int], Local], places: Sequence[int], local: Local) -> Local:
    """Apply a function along one dimension, or along several as if they were one."""
    if len(places) == 1:
        return function(local, places[0])
    last = range(local.dim() - len(places), local.dim())
    turned = local.movedim(tuple(places), tuple(last))
    return function(turned.flatten(last.start), -1).view(turned.shape).movedim(tuple(last), tuple(places))


def cumsum(tensor: Tensor, over: Dim) -> Tensor:
    """Running sum along a dimension: on a split one, what the ranks before hold is added."""
    place = tensor.place(over, "cumsum")
    running = torch.cumsum(tensor.local, place)
    scope, totals = tensor.scope, running.narrow(place, running.shape[place] - 1, 1)
    if not scope.axes_of(over):
        return tensor.with_part(running)
    for axis in reversed(scope.axes_of(over)):
        totals = scope.wire.gather(totals, axis, place, label_of("cumsum", tensor.dims), "reduce_scatter")
    before = totals.narrow(place, 0, scope.place_along(over)).sum(place, keepdim=True)
    return tensor.with_part(running + before)


def _extremum(tensor: Tensor, over: Over, op: Literal["max", "min"]) -> Tensor:
    places, kept, axes = reduced(tensor, over, op)
    record("extremum", [tensor], tensor.dims, kept)
    reduce = torch.amax if op == "max" else torch.amin
    local = tensor.local
    if not axes:
        return Tensor(reduce(local, places) if places else local, kept)
    wire, label = tensor.scope.wire, label_of(op, tensor.dims)
    is_wanted = tensor.requires_grad and torch.is_grad_enabled()
    with torch.no_grad():
        own = reduce(local, places, keepdim=True)
        extremum = wire.reduce(own, axes, op, label)
        if not is_wanted:
            return Tensor(_without(extremum, places), kept)
        ties = (local == extremum).to(local.dtype)
        ties /= wire.reduce(ties.sum(places, keepdim=True), axes, "sum", label)
    attained = cast("Local", _Attained.apply(local, ties, extremum, partial(wire.enter, axes=axes, label=label)))
    return Tensor(_without(attained, places), kept)


class _Attained(torch.autograd.Function):
    """An extremum that was found already; its gradient goes to the entries that attain it."""

    @staticmethod
    def forward(ctx: Any, local: Local, shares: Local, extremum: Local, enter: Callable[[Local], Local]) -> Local:
        ctx.save_for_backward(shares)
        ctx.enter = enter
        return extremum.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Local) -> tuple[Local, None, None, None]:
        (shares,) = ctx.saved_tensors
        return ctx.enter(gradients[0]) * shares, None, None, None  # it may have a gradient itself


def _without(local: Local, places: Sequence[int]) -> Local:
    """Take away dimensions of size 1."""
    return local.squeeze(tuple(places))


def _floating(tensor: Tensor) -> Tensor:
    """Integers as torch.logsumexp takes them: the difference of two may be none of their dtype."""
    is_floating = tensor.dtype.is_floating_point or tensor.dtype.is_complex
    return tensor if is_floating else tensor.to(torch.get_default_dtype())


def _below_largest(tensor: Tensor, over: Over) -> Tensor:
    """The largest value subtracted, as before exponentials; where all is minus infinity, nothing."""
    largest = max(tensor.detach(), over).map(lambda local: local.masked_fill(local.isneginf(), 0))
    return elementwise(torch.sub, tensor, largest)
