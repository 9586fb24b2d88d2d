"""Contraction: products of any number of tensors, summed over the dimensions that the result does not have."""

from __future__ import annotations

import string
from collections.abc import Sequence

import torch

from tulle.errors import ModelError
from tulle.named.dims import Dim, Dims, spelled, united
from tulle.named.placed import Axes, Local, Placed, label_of, record, shared_scope
from tulle.named.scope import Scope


class Plan:
    """An einsum on this rank's parts: its equation, over which axes inputs enter, over which the result is a sum."""

    __slots__ = ("dims", "enters", "equation", "label", "reduced")

    def __init__(self, scope: Scope, inputs: Sequence[Dims], out: Dims) -> None:
        self.dims = united(*inputs)
        for dim in united(out, self.dims)[len(self.dims) :]:
            raise ModelError(f"einsum is to give dimension {dim!r}, which no input has: they have {spelled(self.dims)}")
        if len(set(out)) < len(out):
            raise ModelError(f"einsum is to give {spelled(out)}, with one dimension twice: rename one of them first")
        split = scope.axes(self.dims, "einsum over")
        letters = dict(zip(self.dims, string.ascii_letters, strict=False))
        self.equation = ",".join(_word(dims, letters) for dims in inputs) + "->" + _word(out, letters)
        self.enters = [tuple(sorted(axis for axis in split if split[axis] not in dims)) for dims in inputs]
        self.reduced: Axes = tuple(sorted(axis for axis in split if split[axis] not in out))
        self.label = label_of("einsum", self.dims)


def contract(inputs: Sequence[Placed], out: Dims) -> tuple[Local, Dims, Axes]:
    """Multiply tensors and sum over what `out` leaves away; dimensions of one name are one.

    Returns:
        This rank's part, `out`, and the axes over which the sum is pending.

    Raises:
        PlanError: If two dimensions of the operation are split over one axis.
        ModelError: If one dimension name comes with two sizes, or `out` has what no input has.
    """
    scope = shared_scope(inputs, "einsum")
    key = ("einsum", out, *[one.dims for one in inputs])
    plan: Plan | None = scope.plans.get(key)
    if plan is None:
        plan = scope.plans[key] = Plan(scope, key[2:], out)
    if scope.trace is not None:
        record("product", inputs, plan.dims, out)
    parts = [
        one.entered(axes, plan.label) if axes else one.local for one, axes in zip(inputs, plan.enters, strict=True)
    ]
    return torch.einsum(plan.equation, *parts), out, plan.reduced


def _word(dims: Dims, letters: dict[Dim, str]) -> str:
    return "".join(letters[dim] for dim in dims)
