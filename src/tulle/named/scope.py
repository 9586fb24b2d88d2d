"""`use` and `Scope`: the mesh and the layout under which named tensors live, and what is legal there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from tulle.errors import MeshError, PlanError
from tulle.mesh import Mesh
from tulle.named.dims import Dim, Dims, Layout, spelled
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
        is_split = any(self.sizes.get(axis, 1) > 1 for _, axis in layout.items())
        self.gradients = Gradients(wire if is_split else None)
        self.trace: list[Step] | None = None
        """Where operations are written down for the layout search; then none takes a short cut."""

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

    def axis(self, dim: Dim) -> str | None:
        """The axis that splits a dimension, or None; an axis of one rank splits nothing."""
        axis = self.layout.get(dim.name)
        return axis if axis is not None and self.sizes.get(axis, 1) > 1 else None

    def axes(self, dims: Dims, what: str) -> dict[str, Dim]:
        """The axes that split some dimensions, each with its dimension.

        Args:
            dims: All dimensions of a tensor or of an operation.
            what: The tensor or operation, for the error.

        Raises:
            PlanError: If two of them are split over one axis, or a size does not divide evenly.
        """
        found = self._splits.get(dims)
        if found is None:
            found = self._splits[dims] = self._split(dims, what)
        return found

    def _split(self, dims: Dims, what: str) -> dict[str, Dim]:
        found: dict[str, Dim] = {}
        for dim in dims:
            axis = self.axis(dim)
            if axis is None:
                continue
            if axis in found:
                raise PlanError(
                    f"{what} {spelled(dims)} has dimensions {found[axis].name!r} and {dim.name!r} both split over mesh "
                    f"axis {axis!r}: take one of them out of the layout, or rename it before the operation"
                )
            if dim.size % self.sizes[axis]:
                raise PlanError(
                    f"{what} {spelled(dims)}: dimension {dim.name!r} of size {dim.size} does not divide evenly among "
                    f"the {self.sizes[axis]} ranks of mesh axis {axis!r}: pad it to "
                    f"{-(-dim.size // self.sizes[axis]) * self.sizes[axis]} with tn.pad, or leave it whole"
                )
            found[axis] = dim
        return found

    def is_whole(self, *dims: Dim) -> bool:
        """Whether an operation can take a short cut through kernels that want these dimensions unsplit."""
        return self.trace is None and all(self.axis(dim) is None for dim in dims)

    def local_size(self, dim: Dim) -> int:
        """Entries of a dimension that this rank holds."""
        axis = self.axis(dim)
        return dim.size // self.sizes[axis] if axis else dim.size

    def local_shape(self, dims: Dims) -> tuple[int, ...]:
        """Shape of this rank's part."""
        return tuple(self.local_size(dim) for dim in dims)

    def offset(self, dim: Dim) -> int:
        """Where this rank's entries of a dimension begin."""
        axis = self.axis(dim)
        return self.wire.ranks[axis] * self.local_size(dim) if axis else 0

    def __repr__(self) -> str:
        mesh = ", ".join(f"{name}={size}" for name, size in self.sizes.items())
        return f"mesh ({mesh}), {self.layout!r}"


_WHOLE = Scope(None, Layout())
_in_force = [_WHOLE]
"""The scopes of the blocks that are open, outermost first. One for all threads: backward may run in others."""


def current() -> Scope:
    """The scope in force; without `use`, one process that holds everything whole."""
    return _in_force[-1]


@contextmanager
def use(mesh: Mesh, layout: Layout | str | Mapping[str, str]) -> Iterator[Scope]:
    """Lay named tensors out over a mesh within a `with` block. Every rank must enter it, with the same layout.

    Blocks with the same mesh and layout are one: tensors go from one to the other.

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
    layout = layout if isinstance(layout, Layout) else Layout(layout)
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
