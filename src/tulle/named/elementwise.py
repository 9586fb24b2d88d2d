"""Elementwise operations on placed tensors, broadcast by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tulle.named.dims import Dims, united
from tulle.named.placed import Local, Placed, label_of, record, shared_scope, view_to, viewed
from tulle.named.scope import Scope

Scalar = int | float | bool


class Plan:
    """How inputs of given dimensions enter an elementwise operation; worked out once, and kept by the scope."""

    __slots__ = ("dims", "inputs", "label")

    def __init__(self, scope: Scope, inputs: Sequence[Dims], operation: str) -> None:
        self.dims = united(max(inputs, key=len), *inputs)
        self.label = label_of(operation, self.dims)
        split = scope.axes(self.dims, f"{operation} of")
        entered = [tuple(sorted(axis for axis in split if split[axis] not in dims)) for dims in inputs]
        self.inputs = [(axes, view_to(dims, self.dims)) for axes, dims in zip(entered, inputs, strict=True)]


def broadcast(function: Callable[..., Local], inputs: Sequence[Placed | Scalar], **options: Any) -> tuple[Local, Dims]:
    """Apply an elementwise function of plain tensors to parts that are brought to one order of dimensions.

    Returns:
        The result, and its dimensions: those of the widest input, then what others add.

    Raises:
        PlanError: If the operation is not legal in the layout.
        ModelError: If one dimension name comes with two sizes, or an input lives under another layout.
    """
    placed = [one for one in inputs if isinstance(one, Placed)]
    operation = function.__name__
    scope = shared_scope(placed, operation)
    key = (operation, *[one.dims for one in placed])
    plan: Plan | None = scope.plans.get(key)
    if plan is None:
        plan = scope.plans[key] = Plan(scope, key[1:], operation)
    if scope.trace is not None:
        record("pointwise", placed, plan.dims, plan.dims)
    places = iter(plan.inputs)
    parts: list[Any] = []
    for one in inputs:
        if isinstance(one, Placed):
            axes, view = next(places)
            parts.append(viewed(one.entered(axes, plan.label) if axes else one.local, view))
        else:
            parts.append(one)
    return function(*parts, **options), plan.dims
