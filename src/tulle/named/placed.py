"""`Placed`: this rank's part of a tensor with named dimensions; when it is summed, and how it enters an operation.

Two rules make every legal layout give the numbers of one process (Mesh-TensorFlow, section 4, with gradients):

- *f*: an input enters an operation as it is; its gradient is summed over the axes that split the operation but not it.
- *g*: a result leaves an operation summed over the axes that split the dimensions which it has lost; its gradient
  passes as it is.

Both are done late and once. A sum stays *pending* through additions, scalings and renames, until somebody needs it;
what entered once over some axes has entered for all who want it over the same; and what enters straight after it was
gathered does both in one: its gradient is reduce-scattered.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import torch

from tulle.errors import ModelError
from tulle.named.dims import Dim, Dims, check_dim, spelled
from tulle.named.scope import Scope, current
from tulle.named.trace import Input, Kind, Moves, Step

Local = torch.Tensor
"""This rank's part: a plain tensor."""
Axes = tuple[str, ...]


class Gathering(NamedTuple):
    """An all-gather that has not been done yet."""

    source: Local
    axis: str
    dim: int
    label: str


class Placed:
    """This rank's part of a tensor with named dimensions.

    Args:
        part: This rank's part, its dimensions in the order of `dims`.
        dims: The dimensions, whole sizes, in any order.
        pending: Axes over which `part` is still to be summed, sorted.
        scope: The mesh and layout; default those in force.
    """

    __slots__ = ("_entered", "_gathering", "_part", "dims", "pending", "scope")
    mend: ClassVar[str] = "enter tn.use with its mesh and layout, or bring it over with tn.to_torch and tn.from_torch"
    """What to do about one that lives under another layout."""
    is_parameter: ClassVar[bool] = False

    def __init__(
        self,
        part: Local | Gathering,
        dims: Dims,
        pending: Axes = (),
        scope: Scope | None = None,
    ) -> None:
        self._part: Local | None = None
        self._gathering: Gathering | None = None
        if isinstance(part, torch.Tensor):
            self._part = part
        else:
            self._gathering = part
        self.dims = dims
        self.pending = pending
        self.scope = scope or current()
        self._entered: dict[Axes, Local] | None = None

    @property
    def part(self) -> Local:
        """This rank's part as it is: where `pending` names axes, a part of a sum over them."""
        if self._part is not None:
            return self._part
        gathering = self._gathering
        assert gathering is not None, "a part is there or is to be gathered"
        part = self.scope.wire.gather(gathering.source, gathering.axis, gathering.dim, gathering.label)
        if self._keeps(gathering.source):
            self._part = part
        return part

    @property
    def local(self) -> Local:
        """This rank's part, summed if a sum was pending. Every rank of the pending axes must ask for it."""
        if not self.pending:
            return self.part
        part = self.part
        settled = self.scope.wire.leave(part, self.pending, label_of("sum", self.dims))
        if self._keeps(part):
            self._part, self.pending = settled, ()
        return settled

    def entered(self, axes: Axes, label: str) -> Local:
        """This rank's part as it enters an operation that further axes split: *f*, once for all who share it."""
        if not axes or not torch.is_grad_enabled() or not self.requires_grad:
            return self.local
        if self._entered is None:
            self._entered = {}
        if axes not in self._entered:
            self._entered[axes] = self._enter(axes, label)
        return self._entered[axes]

    def enter_as(self, other: Placed) -> None:
        """Share what enters with a tensor of the same part, as under another name."""
        if self._part is not None and self._part is other._part and not self.pending:
            other._entered = self._entered = {} if other._entered is None else other._entered

    def _enter(self, axes: Axes, label: str) -> Local:
        gathering, wire = self._gathering, self.scope.wire
        if self._part is not None or gathering is None or self.pending or gathering.axis not in axes:
            return wire.enter(self.local, axes, label)
        source, axis, dim, gathered = gathering
        entered = wire.gather(source, axis, dim, gathered, "reduce_scatter")
        rest = tuple(other for other in axes if other != axis)
        return wire.enter(entered, rest, label) if rest else entered

    @staticmethod
    def _keeps(source: Local) -> bool:
        # What is computed from it without gradients must not stand for it where gradients are wanted.
        return torch.is_grad_enabled() or not source.requires_grad

    @property
    def _shown(self) -> Local:
        """Some tensor of this one's dtype and device."""
        if self._part is not None:
            return self._part
        assert self._gathering is not None, "a part is there or is to be gathered"
        return self._gathering.source

    @property
    def dtype(self) -> torch.dtype:
        """Of the numbers."""
        return self._shown.dtype

    @property
    def device(self) -> torch.device:
        """Where this rank's part is."""
        return self._shown.device

    @property
    def requires_grad(self) -> bool:
        """Whether gradients flow back through it."""
        return self._shown.requires_grad

    def dim(self, name: str) -> Dim:
        """The dimension of a name.

        Raises:
            ModelError: If there is none.
        """
        for dim in self.dims:
            if dim.name == name:
                return dim
        raise ModelError(f"the tensor has dimensions {spelled(self.dims)}, none is called {name!r}: name one of these")

    def place(self, dim: Dim, what: str) -> int:
        """Place of a dimension among the others, from 0.

        Raises:
            ModelError: If the tensor does not have it.
        """
        if dim in self.dims:
            return self.dims.index(dim)
        check_dim(dim)
        raise ModelError(
            f"{what} was given dimension {dim!r}, but the tensor has {spelled(self.dims)}: name one of these"
        )

    def __repr__(self) -> str:
        split = ((dim, "+".join(self.scope.axes_of(dim))) for dim in self.dims)
        laid_out = ", ".join(f"{dim!r}/{axes}" if axes else f"{dim!r}" for dim, axes in split)
        pending = f"; sum over {', '.join(self.pending)} pending" if self.pending else ""
        return f"{type(self).__name__}({laid_out}; {str(self.dtype).removeprefix('torch.')}{pending})"


def record(kind: Kind, inputs: Sequence[Placed], dims: Dims, out: Dims, moves: Moves = ()) -> None:
    """Write an operation down, if the scope in force wants it."""
    trace = current().trace
    if trace is not None:
        trace.append(Step(kind, tuple(map(_as_input, inputs)), dims, out, moves, current().is_recomputed))


def _as_input(tensor: Placed) -> Input:
    role = "fixed" if not tensor.requires_grad else "parameter" if tensor.is_parameter else "trained"
    return Input(tensor.dims, role, tensor.dtype.itemsize)


def label_of(operation: str, dims: Dims) -> str:
    """What an operation's collectives are counted under."""
    return f"{operation} {' '.join(dim.name for dim in dims)}"


def shared_scope(inputs: Sequence[Placed], operation: str) -> Scope:
    """The scope of an operation's inputs, which is the one in force.

    Raises:
        ModelError: If an input lives under another mesh or layout, or is a plain tensor.
    """
    scope = current()
    for one in inputs:
        if not isinstance(one, Placed) or one.scope is not scope:
            check_named(one, operation)
            raise ModelError(
                f"{operation} was given {one!r}, which lives under {one.scope!r}, but in force is {scope!r}: {one.mend}"
            )
    return scope


def check_named(given: object, operation: str) -> None:
    """Refuse plain tensors beside named ones: nobody can tell how they are laid out.

    Raises:
        ModelError: Saying what was given.
    """
    if not isinstance(given, Placed):
        shape = f"a plain tensor of shape {tuple(given.shape)}" if isinstance(given, torch.Tensor) else repr(given)
        raise ModelError(
            f"{operation} was given {shape} beside named tensors: say what the dimensions of a plain one are with "
            "tn.from_torch(tensor, dims)"
        )


View = tuple[list[int] | None, list[int]] | None


def view_to(dims: Dims, out: Dims) -> View:
    """How a tensor of `dims` is brought to the order of `out`: a permutation, and where dimensions of size 1 go.

    Torch broadcasts along dimensions that are missing in front: for these nothing is to be done.
    """
    order = [dims.index(dim) for dim in out if dim in dims]
    first = next((place for place, dim in enumerate(out) if dim in dims), len(out))
    missing = [place - first for place, dim in enumerate(out) if place > first and dim not in dims]
    return (None if order == sorted(order) else order, missing) if missing or order != sorted(order) else None


def viewed(local: Local, view: View) -> Local:
    """Bring a part into an operation's order of dimensions."""
    if view is None:
        return local
    order, missing = view
    if order is not None:
        local = local.permute(order)
    for place in missing:
        local = local.unsqueeze(place)
    return local


def aligned(local: Local, dims: Dims, out: Dims) -> Local:
    """A part in the order of `out`, with size 1 where it lacks a dimension that is not in front of all its own."""
    return viewed(local, view_to(dims, out))
