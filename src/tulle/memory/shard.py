"""`Shard`: which part of one parameter lies on this rank between its uses, when parameters are shared out over an axis.

A parameter is cut along its longest dimension that divides evenly, else along its longest; one that is shorter than
there are ranks in every dimension stays whole on all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import Tensor

from tulle.comm import all_gather_parts
from tulle.mesh import Axis
from tulle.parts import local_of

_SHARD = "_tulle_shard"
"""The attribute by which a parameter knows that it is a part of one."""


@dataclass(frozen=True)
class Shard:
    """How one parameter is shared out over the ranks of an axis.

    Args:
        axis: Whose ranks hold the parts.
        dim: The dimension that is cut, as `torch.tensor_split` does: the first ranks may have one more.
        shape: Of the whole: of what this rank computes with, which may itself be a part over another axis.
    """

    axis: Axis
    dim: int
    shape: torch.Size

    @staticmethod
    def of(parameter: Tensor, axis: Axis) -> Shard | None:
        """How a parameter is cut; None if it is too small to be.

        Example:
            >>> import torch, tulle
            >>> Shard.of(torch.ones(3, 4), tulle.init(data=-1)["data"]).dim
            1
        """
        lengths = list(parameter.shape)
        if max(lengths, default=0) < axis.size or 0 in lengths:
            return None
        even = [length if length % axis.size == 0 else 0 for length in lengths]
        found = even if any(even) else lengths
        return Shard(axis, found.index(max(found)), parameter.shape)

    def length(self, rank: int) -> int:
        """How long a rank's part is along the dimension that is cut."""
        return self._lengths[rank]

    def shape_on(self, rank: int) -> tuple[int, ...]:
        """The shape of a rank's part."""
        return (*self.shape[: self.dim], self._lengths[rank], *self.shape[self.dim + 1 :])

    @cached_property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of this rank's part."""
        return self.shape_on(self.axis.rank)

    def size_on(self, rank: int) -> int:
        """Number of elements of a rank's part."""
        return self._lengths[rank] * self._times

    def begin_on(self, rank: int) -> int:
        """Where a rank's part begins in the whole, along the dimension that is cut."""
        return sum(self._lengths[:rank])

    @cached_property
    def _lengths(self) -> Sequence[int]:
        """By rank: what is asked in each step."""
        each, longer = divmod(self.shape[self.dim], self.axis.size)
        return [each + (rank < longer) for rank in range(self.axis.size)]

    @cached_property
    def _times(self) -> int:
        """How many numbers there are for each place along the dimension that is cut."""
        return prod((*self.shape[: self.dim], *self.shape[self.dim + 1 :]))

    def part(self, whole: Tensor) -> Tensor:
        """This rank's part, in memory of its own."""
        part = local_of(whole).narrow(self.dim, self.begin_on(self.axis.rank), self.length(self.axis.rank))
        return part.clone(memory_format=torch.contiguous_format)

    @torch.no_grad()
    def whole(self, part: Tensor, *, label: str) -> Tensor:
        """The whole, from all ranks' parts. Every rank of the axis must call it."""
        ranks = range(self.axis.size)
        sizes = [self.size_on(rank) for rank in ranks]
        flat = all_gather_parts(local_of(part).reshape(-1), sizes, self.axis, label=label).wait()
        return torch.cat([flat.split(sizes)[rank].view(self.shape_on(rank)) for rank in ranks], self.dim)

    def __deepcopy__(self, memo: object) -> Shard:
        """A copied model's parts lie where the model's do; a process group cannot be copied."""
        return self


def mark(parameter: Tensor, shard: Shard) -> None:
    """Let a parameter know which part of a whole it holds."""
    setattr(parameter, _SHARD, shard)


def shard_of(tensor: Tensor) -> Shard | None:
    """How a parameter is shared out, or None."""
    return getattr(tensor, _SHARD, None)
