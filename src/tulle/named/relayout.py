"""Relayout: moves a tensor's parts so that other dimensions are split, when a rename or a reshape asks for it.

axis a splits     before        after         what travels
                  nothing       a dimension   nothing: each rank keeps its slice (a pending sum: reduce-scatter)
                  a dimension   nothing       all-gather
                  a dimension   another       all-to-all
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tulle.errors import ModelError
from tulle.named.dims import Dim, Dims, spelled
from tulle.named.placed import Axes, Gathering, Local, Placed, label_of, record, shared_scope
from tulle.named.scope import Scope

Splits = list[str | None]
"""The axis that splits each dimension of a part, by place."""


def renamed(tensor: Placed, names: Mapping[str, Dim]) -> tuple[Local | Gathering, Dims, Axes]:
    """Give dimensions other names of the same size; several at once may swap theirs.

    Raises:
        ModelError: If a dimension is not there, or a size differs.
        PlanError: If the result is not legal in the layout.
    """
    for name, new in names.items():
        if tensor.dim(name).size != new.size:
            raise ModelError(
                f"rename of {tensor.dim(name)!r} to {new!r} changes the size: rename to a dimension of the same size, "
                "or use tn.slice or tn.pad"
            )
    scope = shared_scope([tensor], "rename")
    dims = tuple(names.get(dim.name, dim) for dim in tensor.dims)
    check_once(dims, "rename")
    scope.axes(dims, "rename to")
    record("move", [tensor], tensor.dims, dims, tuple(zip(tensor.dims, dims, strict=True)))
    before = [scope.axis(dim) for dim in tensor.dims]
    after = [scope.axis(dim) for dim in dims]
    return moved(tensor, dims, before, after)


def moved(tensor: Placed, dims: Dims, before: Splits, after: Splits) -> tuple[Local | Gathering, Dims, Axes]:
    """Bring a tensor's parts from one splitting to another; a last all-gather is put off until it is needed."""
    grows = any(axis is not None and axis not in after for axis in before)
    part = tensor.local if grows else tensor.part  # sum the smaller one
    mover = Mover(tensor.scope, part, label_of("relayout", dims), before, tensor.pending)
    return mover.last_gathering(after) or mover.move(after), dims, mover.pending


class Mover:
    """A tensor's part on its way from one splitting to another.

    Args:
        scope: The mesh and layout.
        part: This rank's part.
        label: What its exchanges are counted under.
        splits: The axis that splits each of its dimensions, or None.
        pending: Axes over which it is still to be summed.
    """

    def __init__(self, scope: Scope, part: Local, label: str, splits: Splits, pending: Axes = ()) -> None:
        self.scope = scope
        self.part = part
        self.label = label
        self.splits = list(splits)
        self.pending = pending

    def last_gathering(self, after: Splits) -> Gathering | None:
        """The all-gather, if one is all that is to be done: the use decides how its gradient comes back."""
        waiting = self._waiting(after)
        if len(waiting) != 1 or waiting[0] in after:
            return None
        return Gathering(self.part, waiting[0], self.splits.index(waiting[0]), self.label)

    def move(self, after: Splits) -> Local:
        """Do what is to be done, axis by axis, each dimension split over one axis at a time."""
        waiting = self._waiting(after)
        for axis in [axis for axis in waiting if axis not in after]:
            self.gather(axis)
            waiting.remove(axis)
        while waiting:
            free = [axis for axis in waiting if self.splits[after.index(axis)] is None]
            if not free:  # dimensions swap their axes: one is made whole first
                self.gather(waiting[0])
                continue
            self._split(free[0], after.index(free[0]))
            waiting.remove(free[0])
        return self.part

    def gather(self, axis: str) -> None:
        """Make the dimension whole that an axis splits."""
        place = self.splits.index(axis)
        self.part = self.scope.wire.gather(self.part, axis, place, self.label)
        self.splits[place] = None

    def _split(self, axis: str, place: int) -> None:
        wire = self.scope.wire
        if axis in self.splits:
            old = self.splits.index(axis)
            self.part = wire.exchange(self.part, axis, place, old, self.label)
            self.splits[old] = None
        elif axis in self.pending:
            self.part = wire.reduce_scatter(self.part, axis, place, self.label)
            self.pending = tuple(other for other in self.pending if other != axis)
        else:
            self.part = wire.scatter(self.part, axis, place, self.label)
        self.splits[place] = axis

    def _waiting(self, after: Splits) -> list[str]:
        """Axes that split another dimension afterwards, or none, or one only afterwards."""
        axes = [axis for axis in dict.fromkeys([*self.splits, *after]) if axis is not None]
        return [axis for axis in axes if _place_of(axis, self.splits) != _place_of(axis, after)]


def _place_of(axis: str, splits: Splits) -> int | None:
    return splits.index(axis) if axis in splits else None


def check_once(dims: Sequence[Dim], what: str) -> None:
    """Refuse dimensions of which one name comes twice."""
    names = [dim.name for dim in dims]
    if len(set(names)) < len(names):
        raise ModelError(f"{what} is to give {spelled(dims)}, with one name twice: take another name")
