"""`use` and `Scope`: the mesh and the layout under which named tensors live, and what is legal there."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from tulle.errors import MeshError, PlanError
from tulle.mesh import Mesh
from tulle.named.dims import Chosen, Dim, Dims, Layout, check_once, spelled
from tulle.named.gradients import Gradients
from tulle.named.trace import Step
from tulle.named.wire import ProcessWire, Wire


class Scope:
    """A layout on a wire: which axis splits a dimension, which part this rank holds, and which operations are legal.

    The invariant on which all gradients rest: ranks that agree on the coordinates of the axes that split a tensor hold
    equal values of it, and equal gradients.

    Args:
        wire: What connects the ranks; None for a single process without a mesh.
        layout: The rules.
    """

    def __init__(self, wire: Wire | None, layout: Layout) -> None:
        self.wire_or_none = wire
        self.layout = layout
        self.sizes: Mapping[str, int] = wire.sizes if wire else {}
        layout.check_spelling(self.sizes)
        self.plans: dict[Any, Any] = {}
        """What operations worked out for dimensions that they have seen before."""
        self._splits: dict[Dims, dict[str, Dim]] = {}
        several = [axis for axis, size in self.sizes.items() if size > 1]
        self._axes_of = {name: tuple(axis for axis in several if axis in layout.axes_of(name)) for name in layout}
        self._parts_of = {name: math.prod(self.sizes[axis] for axis in axes) for name, axes in self._axes_of.items()}
        self.is_split = any(self._axes_of.values())
        """Whether the layout splits anything at all on this mesh."""
        self.gradients = Gradients(wire if self.is_split else None)
        self.whole: set[Dim] = set()
        """Dimensions that some operation must see whole."""
        self.trace: list[Step] | None = None
        """Where operations are written down for the layout search; then none takes a short cut."""
        self.is_recomputed = False
        """Whether what is written down is done again in backward."""

    @property
    def wire(self) -> Wire:
        """What connects the ranks."""
        assert self.wire_or_none is not None, "nothing is split where there is no mesh"
        return self.wire_or_none

    @property
    def seen(self) -> Iterable[Dims]:
        """The dimensions of every tensor and operation that was checked here."""
        return self._splits

    @property
    def device(self) -> torch.device | None:
        """Where parts are made: the mesh's device, or without a mesh None, torch's default."""
        return self.wire_or_none.device if self.wire_or_none else None

    @property
    def is_on_paper(self) -> bool:
        """Whether parts are tensors without numbers."""
        return self.device is not None and self.device.type == "meta"

    def axes_of(self, dim: Dim) -> tuple[str, ...]:
        """The axes that split a dimension, in the mesh's order; an axis of one rank splits nothing.

        Of several, the first cuts it into its parts, the next each part again.
        """
        return self._axes_of.get(dim.name, ())

    def parts_of(self, dim: Dim) -> int:
        """Among how many ranks a dimension is split."""
        return self._parts_of.get(dim.name, 1)

    def place_along(self, dim: Dim) -> int:
        """Which of a dimension's parts this rank holds, from 0."""
        place = 0
        for axis in self.axes_of(dim):
            place = place * self.sizes[axis] + self.wire.ranks[axis]
        return place

    def axes(self, dims: Dims, what: str) -> dict[str, Dim]:
        """The axes that split some dimensions, each with its dimension.

        Args:
            dims: All dimensions of a tensor or of an operation.
            what: The tensor or operation, for the error.

        Raises:
            PlanError: If two of them are split over one axis, or a size does not divide evenly.
            ModelError: If one name comes twice.
        """
        found = self._splits.get(dims)
        if found is None:
            found = self._splits[dims] = self._split(dims, what)
        return found

    def _split(self, dims: Dims, what: str) -> dict[str, Dim]:
        check_once(dims, what)
        found: dict[str, Dim] = {}
        for dim in dims:
            for axis in self.axes_of(dim):
                if axis in found:
                    raise PlanError(
                        f"{what} {spelled(dims)} has dimensions {found[axis].name!r} and {dim.name!r} both split over "
                        f"mesh axis {axis!r}: take one of them out of the layout, or rename it before the operation"
                    )
                found[axis] = dim
            parts = self.parts_of(dim)
            if dim.size % parts:
                raise PlanError(
                    f"{what} {spelled(dims)}: dimension {dim.name!r} of size {dim.size} does not divide evenly among "
                    f"the {parts} ranks of mesh axis {'+'.join(self.axes_of(dim))!r}: pad it to "
                    f"{-(-dim.size // parts) * parts} with tn.pad, or leave it whole"
                )
        return found

    def check_whole(self, dims: Iterable[Dim], what: str) -> None:
        """Refuse that an operation's dimensions be split which it must see whole.

        Raises:
            PlanError: Naming the first that is.
        """
        for dim in dims:
            self.whole.add(dim)
            if self.axes_of(dim):
                raise PlanError(
                    f"{what} {dim!r}, which the layout splits over mesh axis {'+'.join(self.axes_of(dim))!r}: leave it "
                    "whole, or rename it before the operation"
                )

    def is_whole(self, *dims: Dim) -> bool:
        """Whether an operation can take a short cut through kernels that want these dimensions unsplit."""
        return self.trace is None and not any(map(self.axes_of, dims))

    def local_size(self, dim: Dim) -> int:
        """Entries of a dimension that this rank holds."""
        return dim.size // self.parts_of(dim)

    def local_shape(self, dims: Dims) -> tuple[int, ...]:
        """Shape of this rank's part."""
        return tuple(self.local_size(dim) for dim in dims)

    def offset(self, dim: Dim) -> int:
        """Where this rank's entries of a dimension begin."""
        return self.place_along(dim) * self.local_size(dim)

    def __deepcopy__(self, _: object) -> Scope:
        """A copy of a model lives where the model does."""
        return self

    def __repr__(self) -> str:
        if self.wire_or_none is None:
            return "one process without a mesh"
        mesh = ", ".join(f"{name}={size}" for name, size in self.sizes.items())
        return f"mesh ({mesh}), {self.layout!r}"


_WHOLE = Scope(None, Layout())
_in_force = [_WHOLE]
"""The scopes of the blocks that are open, outermost first. One for all threads: backward may run in others."""


def current() -> Scope:
    """The scope in force; without `use`, one process that holds everything whole."""
    return _in_force[-1]


@contextmanager
def use(mesh: Mesh, layout: Layout | str | Mapping[str, str] | Chosen) -> Iterator[Scope]:
    """Lay named tensors out over a mesh within a `with` block. Every rank must enter it, with the same layout.

    Blocks with the same mesh and layout are one: tensors go from one to the other.

    Args:
        mesh: The mesh.
        layout: The rules, or what has chosen them: the answer of `tn.best_layout`, or one of its explanations.

    Raises:
        PlanError: If a rule of the layout cannot be read, or nearly names a dimension or an axis.

    Example:
        >>> import torch, tulle
        >>> from tulle import named as tn
        >>> batch, d_model = tn.dims(batch=4, d_model=2)
        >>> with tn.use(tulle.init(data=-1), "batch:data"):
        ...     print(tn.from_torch(torch.ones(4, 2), (batch, d_model)))
        Tensor(batch=4, d_model=2; float32)
    """
    if not isinstance(mesh, Mesh):
        raise MeshError(f"tn.use was given {mesh!r} as its mesh, expected what tulle.init gives")
    layout = Layout.of(layout)
    scopes: dict[Layout, Scope] = mesh.axes[0].kept.setdefault(Scope, {})
    if layout not in scopes:
        scopes[layout] = Scope(ProcessWire(mesh), layout)
    with entered(scopes[layout]) as scope:
        yield scope


@contextmanager
def entered(scope: Scope) -> Iterator[Scope]:
    """Make a scope the current one within a `with` block."""
    _in_force.append(scope)
    try:
        yield scope
    finally:
        _in_force.pop()
