"""Relayout: moves a tensor's parts so that other dimensions are split, when a rename or a reshape asks for it.

axis a splits     before        after         what travels
                  nothing       a dimension   nothing: each rank keeps its slice (a pending sum: reduce-scatter)
                  a dimension   nothing       all-gather
                  a dimension   another       all-to-all

Of several axes that split one dimension, the innermost leaves it first: its parts lie next to each other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from tulle.errors import ModelError
from tulle.named.dims import Dim, Dims, check_dim
from tulle.named.placed import Axes, Gathering, Local, Placed, label_of, record, shared_scope
from tulle.named.scope import Scope

Splits = list[Axes]
"""The axes that split each dimension of a part, by place, the outermost first."""


def renamed(tensor: Placed, names: Mapping[str, Dim]) -> tuple[Local | Gathering, Dims, Axes]:
    """Give dimensions other names of the same size; several at once may swap theirs.

    Raises:
        ModelError: If a dimension is not there, or a size differs.
        PlanError: If the result is not legal in the layout.
    """
    scope = shared_scope([tensor], "rename")
    key = (renamed, tensor.dims, *names.items())
    dims: Dims | None = scope.plans.get(key)
    if dims is None:
        dims = _checked(tensor, names)
        scope.axes(dims, "rename to")
        scope.plans[key] = dims
    if scope.trace is not None:
        record("move", [tensor], tensor.dims, dims, tuple(zip(tensor.dims, dims, strict=True)))
    if not scope.is_split:
        return tensor.part, dims, ()
    return moved(tensor, dims)


def _checked(tensor: Placed, names: Mapping[str, Dim]) -> Dims:
    for name, new in names.items():
        check_dim(new)
        if tensor.dim(name).size != new.size:
            raise ModelError(
                f"rename of {tensor.dim(name)!r} to {new!r} changes the size: rename to a dimension of the same size, "
                "or use tn.slice or tn.pad"
            )
    dims = tuple(names.get(dim.name, dim) for dim in tensor.dims)
    return dims


def moved(tensor: Placed, dims: Dims) -> tuple[Local | Gathering, Dims, Axes]:
    """Bring a tensor's parts to the splitting of other dimensions; a last all-gather is put off until it is needed."""
    before, after = splits_of(tensor.scope, tensor.dims), splits_of(tensor.scope, dims)
    grows = not set().union(*before) <= set().union(*after)
    # The smaller one is summed. Without gradients `local` leaves the tensor itself as it was.
    part, pending = (tensor.local, ()) if grows else (tensor.part, tensor.pending)
    mover = Mover(tensor.scope, part, label_of("relayout", dims), before, pending)
    return mover.last_gathering(after) or mover.move(after), dims, mover.pending


class Mover:
    """A tensor's part on its way from one splitting to another.

    Args:
        scope: The mesh and layout.
        part: This rank's part.
        label: What its exchanges are counted under.
        splits: The axes that split each of its dimensions.
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
        changed = [place for place, axes in enumerate(self.splits) if axes != after[place]]
        if len(changed) != 1 or self.splits[changed[0]][:-1] != after[changed[0]]:
            return None
        return Gathering(self.part, self.splits[changed[0]][-1], changed[0], self.label)

    def move(self, after: Splits) -> Local:
        """Do what is to be done, axis by axis: the innermost leaves a dimension, or another comes inside."""
        while self.splits != after:
            leaving, coming = self._leaving(after), self._coming(after)
            kept = set().union(*after)
            unwanted = [axis for axis in leaving if axis not in kept]
            free = [axis for axis in coming if axis in leaving or not any(axis in axes for axes in self.splits)]
            if unwanted:
                self.gather(leaving[unwanted[0]])
            elif free:
                self._split(free[0], coming[free[0]])
            else:  # dimensions swap their axes: one is made whole first
                self.gather(next(iter(leaving.values())))
        return self.part

    def laid_out_as(self, dims: Dims) -> tuple[Local, Dims, Axes]:
        """The part as the layout in force splits its dimensions; them; and the axes over which it is still a sum."""
        return self.move(splits_of(self.scope, dims)), dims, self.pending

    def gather(self, place: int) -> None:
        """Undo the innermost splitting of the dimension at a place."""
        *outer, axis = self.splits[place]
        self.part = self.scope.wire.gather(self.part, axis, place, self.label)
        self.splits[place] = tuple(outer)

    def _split(self, axis: str, place: int) -> None:
        wire = self.scope.wire
        old = next((old for old, axes in enumerate(self.splits) if axis in axes), None)
        if old is not None:
            self.part = wire.exchange(self.part, axis, place, old, self.label)
            self.splits[old] = self.splits[old][:-1]
        elif axis in self.pending:
            self.part = wire.reduce_scatter(self.part, axis, place, self.label)
            self.pending = tuple(other for other in self.pending if other != axis)
        else:
            self.part = wire.scatter(self.part, axis, place, self.label)
        self.splits[place] = (*self.splits[place], axis)

    def _leaving(self, after: Splits) -> dict[str, int]:
        """Innermost axes that are to split their dimension no longer, or only inside another; with its place."""
        both = enumerate(zip(self.splits, after, strict=True))
        return {now[-1]: place for place, (now, then) in both if now != then[: len(now)]}

    def _coming(self, after: Splits) -> dict[str, int]:
        """Axes that are to split a dimension next, inside those that split it already; with its place."""
        both = enumerate(zip(self.splits, after, strict=True))
        return {then[len(now)]: place for place, (now, then) in both if now != then and now == then[: len(now)]}


def splits_of(scope: Scope, dims: Dims, *, whole: int | None = None) -> Splits:
    """The axes that split each dimension; that at place `whole` is taken for split by none."""
    return [() if place == whole else scope.axes_of(dim) for place, dim in enumerate(dims)]


def fitting(scope: Scope, axes: Axes, size: int) -> Axes:
    """As many of the outer axes as a dimension of some size can be split over evenly."""
    while size % math.prod(scope.sizes[axis] for axis in axes):
        axes = axes[:-1]
    return axes
