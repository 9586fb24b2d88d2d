"""`Wire`: how the parts of a named tensor travel along mesh axes, between processes or on paper.

The operations are written once, against this interface. `ProcessWire` sends; `PlannedWire` (`explain`) only counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from tulle import comm
from tulle.comm import Deferred
from tulle.mesh import Axis, Mesh
from tulle.parts import Reduction
from tulle.process_groups import new_group

GatherBackward = Literal["slice", "reduce_scatter"]


class Wire(Protocol):
    """What a layout needs of a mesh. Axes are named; every rank of them must call each method, in one order."""

    @property
    def sizes(self) -> Mapping[str, int]:
        """Number of ranks along each axis."""
        ...

    @property
    def ranks(self) -> Mapping[str, int]:
        """This process's place along each axis."""
        ...

    @property
    def device(self) -> torch.device:
        """Where parts are."""
        ...

    def enter(self, tensor: Tensor, axes: Sequence[str], label: str) -> Tensor:
        """*f*: identity; the gradient is summed over the axes."""
        ...

    def leave(self, tensor: Tensor, axes: Sequence[str], label: str) -> Tensor:
        """*g*: the sum over the axes; the gradient passes as it is."""
        ...

    def gather(self, tensor: Tensor, axis: str, dim: int, label: str, backward: GatherBackward = "slice") -> Tensor:
        """All parts end to end."""
        ...

    def scatter(self, tensor: Tensor, axis: str, dim: int, label: str) -> Tensor:
        """This rank's part."""
        ...

    def reduce_scatter(self, tensor: Tensor, axis: str, dim: int, label: str) -> Tensor:
        """This rank's part of the sum."""
        ...

    def exchange(self, tensor: Tensor, axis: str, split_dim: int, join_dim: int, label: str) -> Tensor:
        """All-to-all."""
        ...

    def halo(self, tensor: Tensor, axes: Sequence[str], dim: int, before: int, after: int, label: str) -> Tensor:
        """This rank's part with what borders on it, zeros beyond the ends; the axes are in the mesh's order."""
        ...

    def reduce(self, tensor: Tensor, axes: Sequence[str], op: Reduction, label: str) -> Tensor:
        """Reduce, in place and without gradients, a tensor that nobody else holds."""
        ...

    def start_sum(self, tensor: Tensor, axes: Sequence[str], label: str) -> Deferred[Tensor]:
        """Start to sum a flat tensor of parameter gradients, in place."""
        ...


@dataclass(frozen=True, slots=True)
class ProcessWire:
    """The wire of a mesh of processes."""

    mesh: Mesh
    sizes: Mapping[str, int] = field(init=False)
    ranks: Mapping[str, int] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "sizes", {axis.name: axis.size for axis in self.mesh.axes})
        object.__setattr__(self, "ranks", {axis.name: axis.rank for axis in self.mesh.axes})

    @property
    def device(self) -> torch.device:
        """The mesh's."""
        return self.mesh.device

    def enter(self, tensor: Tensor, axes: Sequence[str], label: str) -> Tensor:
        """*f*."""
        return comm.enter(tensor, joint(self.mesh, axes), label=label)

    def leave(self, tensor: Tensor, axes: Sequence[str], label: str) -> Tensor:
        """*g*."""
        return comm.leave(tensor, joint(self.mesh, axes), label=label)

    def gather(self, tensor: Tensor, axis: str, dim: int, label: str, backward: GatherBackward = "slice") -> Tensor:
        """All-gather."""
        return comm.gather(tensor, self.mesh[axis], dim=dim, label=label, backward=backward)

    def scatter(self, tensor: Tensor, axis: str, dim: int, label: str) -> Tensor:
        """Slice."""
        return comm.scatter(tensor, self.mesh[axis], dim=dim, label=label)

    def reduce_scatter(self, tensor: Tensor, axis: str, dim: int, label: str) -> Tensor:
        """Reduce-scatter."""
        return comm.reduce_scatter(tensor, self.mesh[axis], dim=dim, label=label)

    def exchange(self, tensor: Tensor, axis: str, split_dim: int, join_dim: int, label: str) -> Tensor:
        """All-to-all."""
        return comm.exchange(tensor, self.mesh[axis], split_dim=split_dim, join_dim=join_dim, label=label)

    def halo(self, tensor: Tensor, axes: Sequence[str], dim: int, before: int, after: int, label: str) -> Tensor:
        """Halo exchange."""
        return comm.halo(tensor, joint(self.mesh, axes), dim=dim, before=before, after=after, label=label)

    def reduce(self, tensor: Tensor, axes: Sequence[str], op: Reduction, label: str) -> Tensor:
        """All-reduce."""
        return comm.all_reduce(tensor.contiguous(), joint(self.mesh, axes), op=op, label=label).wait()

    def start_sum(self, tensor: Tensor, axes: Sequence[str], label: str) -> Deferred[Tensor]:
        """All-reduce beside backward, on a lane of its own: the sums of activations do not wait behind it."""
        return comm.all_reduce(tensor, comm.lane(joint(self.mesh, axes), "named gradients"), label=label)


def joint(mesh: Mesh, names: Iterable[str]) -> Axis:
    """The ranks that differ along some axes only, as one axis: one collective instead of one an axis.

    Made once for each set of axes. Every rank of the mesh must call it, with the same names in the same order.
    """
    names = tuple(names)
    if len(names) == 1:
        return mesh[names[0]]
    kept = mesh.axes[0].kept
    key = (joint, frozenset(names))
    if key not in kept:
        kept[key] = _joined(mesh, names)
    return kept[key]


def _joined(mesh: Mesh, names: Sequence[str]) -> Axis:
    grid = torch.arange(mesh.size).view(*mesh.shape.values())
    coordinates = [slice(None) if axis.name in names else axis.rank for axis in mesh.axes]
    ranks = tuple(grid[tuple(coordinates)].flatten().tolist())
    first = mesh[names[0]]
    name = "+".join(axis.name for axis in mesh.axes if axis.name in names)
    group = dist.group.WORLD if len(ranks) == mesh.size else new_group(ranks, first.timeout_s, purpose=name)
    assert group is not None, "torch.distributed is initialized, as there is a mesh"
    size, rank = len(ranks), ranks.index(mesh.rank)
    return replace(
        first, name=name, rank=rank, size=size, ranks=ranks, group=group, hosts=(), lanes={}, measured=[], kept={}
    )
