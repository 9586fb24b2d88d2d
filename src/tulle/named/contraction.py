"""Contraction: products of any number of tensors, summed over the dimensions that the result does not have."""

from __future__ import annotations

import string
from collections.abc import Sequence

import torch

from tulle.errors import ModelError
from tulle.named.dims import Dim, Dims, as_dims, check_once, spelled, united
from tulle.named.placed import Axes, Local, Placed, label_of, record, shared_scope
from tulle.named.scope import Scope

Product = tuple[Local, Dims, Axes]
"""This rank's part of a product, its dimensions, and the axes over which the sum is pending."""


class Plan:
    """An einsum on this rank's parts: its equation, over which axes inputs enter, over which the result is a sum.

    `what` is the operation as it was written, for errors.
    """

    __slots__ = ("dims", "enters", "equation", "label", "matrix_dims", "out", "reduced")

    def __init__(self, scope: Scope, inputs: Sequence[Dims], out: Dims, what: str) -> None:
        self.dims, self.out = united(*inputs), out
        for dim in united(self.dims, out)[len(self.dims) :]:
            raise ModelError(f"{what} is to give dimension {dim!r}, which no input has: they have {spelled(self.dims)}")
        check_once(out, f"{what} to")
        split = scope.axes(self.dims, f"{what} over")
        letters = dict(zip(self.dims, string.ascii_letters, strict=False))
        self.equation = ",".join(_word(dims, letters) for dims in inputs) + "->" + _word(out, letters)
        self.enters = [tuple(sorted(axis for axis in split if split[axis] not in dims)) for dims in inputs]
        self.reduced: Axes = tuple(sorted(axis for axis in split if split[axis] not in out))
        self.label = label_of("einsum", self.dims)
        self.matrix_dims = _matrix_dims(inputs, out)

    def product(self, scope: Scope, inputs: Sequence[Placed]) -> Product:
        """Multiply what has the dimensions that were planned for."""
        if scope.trace is not None:
            record("product", inputs, self.dims, self.out)
        parts = [
            one.entered(axes, self.label) if axes else one.local for one, axes in zip(inputs, self.enters, strict=True)
        ]
        lost = self.matrix_dims
        local = _times(parts[0], parts[1], lost) if lost else torch.einsum(self.equation, *parts)
        return local, self.out, self.reduced


def contract(inputs: Sequence[Placed], out: Dims) -> Product:
    """Multiply tensors and sum over what `out` leaves away; dimensions of one name are one.

    Raises:
        PlanError: If two dimensions of the operation are split over one axis.
        ModelError: If one dimension name comes with two sizes, or `out` has what no input has.
    """
    scope = shared_scope(inputs, "einsum")
    key = (contract, out, *[one.dims for one in inputs])
    plan: Plan | None = scope.plans.get(key)
    if plan is None:
        plan = scope.plans[key] = Plan(scope, key[2:], out, "einsum")
    return plan.product(scope, inputs)


def multiply(left: Placed, right: Placed, over: Dim | Sequence[Dim]) -> Product:
    """Multiply two tensors and sum over some dimensions of both; what remains of the right one comes last.

    Raises:
        PlanError: If two dimensions of the operation are split over one axis.
        ModelError: If one dimension name comes with two sizes, or one of the two lacks a dimension that is summed over.
    """
    scope = shared_scope((left, right), "dot")
    over = over if isinstance(over, tuple) else as_dims(over)
    key = (multiply, left.dims, right.dims, over)
    plan: Plan | None = scope.plans.get(key)
    if plan is None:
        lost = as_dims(over)
        for dim in lost:
            left.place(dim, "dot")
            right.place(dim, "dot")
        out = tuple(dim for dim in united(left.dims, right.dims) if dim not in lost)
        plan = scope.plans[key] = Plan(scope, (left.dims, right.dims), out, "dot")
    return plan.product(scope, (left, right))


def _matrix_dims(inputs: Sequence[Dims], out: Dims) -> int:
    """How many dimensions are summed over, if the second input is a matrix from these to what it adds; else 0."""
    if len(inputs) != 2:
        return 0
    left, right = inputs
    shared = sum(dim in left for dim in right)
    rest, added = left[: len(left) - shared], right[shared:]
    is_matrix = left[len(rest) :] == right[:shared] and out == (*rest, *added)
    return shared if is_matrix and rest and added else 0


def _times(left: Local, right: Local, lost: int) -> Local:
    """A product with a matrix from the right; torch's einsum takes several times as long to begin."""
    if lost > 1:
        left, right = left.flatten(-lost), right.flatten(0, lost - 1)
    added = right.shape[1:]
    return left @ right if len(added) == 1 else (left @ right.flatten(1)).unflatten(-1, added)


def _word(dims: Dims, letters: dict[Dim, str]) -> str:
    return "".join(letters[dim] for dim in dims)
