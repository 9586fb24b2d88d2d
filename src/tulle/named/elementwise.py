"""Elementwise operations on placed tensors, broadcast by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tulle.errors import ModelError
from tulle.named.dims import Dims, united
from tulle.named.placed import Local, Placed, check_named, label_of, record, shared_scope, view_to, viewed
from tulle.named.scope import Scope

Scalar = int | float | bool


class Plan:
    """How inputs of given dimensions enter an elementwise operation; worked out once, and kept by the scope."""

    __slots__ = ("dims", "inputs", "label", "shape")

    def __init__(self, scope: Scope, inputs: Sequence[Dims], operation: str) -> None:
        self.dims = united(max(inputs, key=len), *inputs)
        self.label = label_of(operation, self.dims)
        split = scope.axes(self.dims, f"{operation} of")
        self.shape = scope.local_shape(self.dims)
        entered = [tuple(sorted(axis for axis in split if split[axis] not in dims)) for dims in inputs]
        self.inputs = [(axes, view_to(dims, self.dims)) for axes, dims in zip(entered, inputs, strict=True)]

    def entered(self, place: int, tensor: Placed) -> Local:
        """An input's part as it enters, in the operation's order of dimensions."""
        axes, view = self.inputs[place]
        local = tensor.entered(axes, self.label) if axes else tensor.local
        return local if view is None else viewed(local, view)


def broadcast(function: Callable[..., Local], inputs: Sequence[Placed | Scalar], **options: Any) -> tuple[Local, Dims]:
    """Apply an elementwise function of plain tensors to parts that are brought to one order of dimensions.

    Returns:
        The result, and its dimensions: those of the widest input, then what others add.

    Raises:
        PlanError: If the operation is not legal in the layout.
        ModelError: If one dimension name comes with two sizes, an input lives under another layout, none is named, or
            the function is not elementwise.
    """
    placed = [one for one in inputs if isinstance(one, Placed)]
    operation = getattr(function, "__name__", "elementwise")
    if not placed:
        check_named(inputs, operation)
    scope = shared_scope(placed, operation)
    key = (operation, *[one.dims for one in placed])
    plan: Plan | None = scope.plans.get(key)
    if plan is None:
        plan = scope.plans[key] = Plan(scope, key[1:], operation)
    if scope.trace is not None:
        record("pointwise", placed, plan.dims, plan.dims)
    parts: list[Any] = [plan.entered(place, one) for place, one in enumerate(placed)]
    if len(parts) < len(inputs):
        for one in inputs:
            if isinstance(one, torch.Tensor):
                check_named(one, operation)
        own = iter(parts)
        parts = [next(own) if isinstance(one, Placed) else one for one in inputs]
    result = function(*parts, **options)
    if result.shape != plan.shape:
        raise ModelError(
            f"{operation} makes shape {tuple(result.shape)} of what has {plan.shape}, so it is not elementwise: sums "
            "and reshapes are in tulle.named"
        )
    return result, plan.dims
