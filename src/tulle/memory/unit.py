"""`Unit`: parameters that are gathered together when a module runs, and how their gradients go back to the owners."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from zlib import crc32

import torch
from torch import Tensor

from tulle.comm import all_gather_parts, all_reduce, used_here
from tulle.memory.execution_order import other_branch
from tulle.memory.scattered import scatter_sums
from tulle.memory.shard import Shard
from tulle.mesh import Axis
from tulle.parts import local_of, locals_of

_MARKS = {torch.bool: 2, torch.int8: 128, torch.uint8: 251}
"""How many marks there are in a dtype of one byte; floats of one byte hold few whole numbers."""
Packed = Sequence[tuple[Sequence[int], Tensor]]
"""Of each dtype the numbers of some parts, and a copy of them end to end, with a mark behind."""


@dataclass(frozen=True, eq=False)
class Unit:
    """Parameters that are gathered together when a module runs.

    Args:
        name: Of the module.
        axis: Over which they are shared out.
        across: Along which there are replicas of that; None if there are none.
        shards: How each is cut.
        places: Where each is: the path of a module from the unit's, the name in it, and the number of the shard. A tied
            parameter has several.
        stays: Whether what forward gathered stays for backward.
        is_apart: Whether its module is inside of another unit's, and gathers for itself where it is called without
            that, as when it is recomputed. What it gathers stays, too, as far as autograd saves it.
    """

    name: str
    axis: Axis
    shards: Sequence[Shard]
    places: Sequence[tuple[str, str, int]]
    across: Axis | None = None
    stays: bool = False
    is_apart: bool = False

    @cached_property
    def count(self) -> int:
        """How many numbers its wholes have."""
        return sum(shard.shape.numel() for shard in self.shards)

    def gather(self, packed: Packed) -> list[Tensor]:
        """The wholes, in memory of their own. Every rank of the axis must call it."""
        wholes: dict[int, Tensor] = {}
        for numbers, own in packed:
            used_here(own)
            sizes = [[*(self.shards[number].size_on(rank) for number in numbers), 1] for rank in range(self.axis.size)]
            gathered = all_gather_parts(own, [sum(of_rank) for of_rank in sizes], self.axis, label="parameters").wait()
            pieces = gathered.split([size for of_rank in sizes for size in of_rank])
            each = len(numbers) + 1
            if not own.is_cuda:  # to look would wait for the device: gradients are looked at there
                self._check(enumerate(torch.cat(pieces[len(numbers) :: each]).tolist()), own.dtype)
            for place, number in enumerate(numbers):
                shard, of_ranks = self.shards[number], pieces[place::each]
                shaped = [piece.view(shard.shape_on(rank)) for rank, piece in enumerate(of_ranks)]
                wholes[number] = torch.cat(shaped, shard.dim)
        return [wholes[number] for number in range(len(self.shards))]

    def pack(self, parts: Sequence[Tensor]) -> Packed:
        """Copies of this rank's parts, and the unit's mark, for `gather`."""
        packed = []
        own = locals_of(parts)
        for numbers in _by_dtype(own, range(len(own))):
            mark = own[numbers[0]].new_tensor([self._mark(own[numbers[0]].dtype)])
            packed.append((numbers, torch.cat([*(own[number].reshape(-1) for number in numbers), mark])))
        return packed

    def reduce(self, gradients: Sequence[Tensor | None], parts: Sequence[Tensor]) -> list[Tensor | None]:
        """Of the means of all ranks' gradients this rank's parts; None where no rank has one. Every rank must call it.

        A flag for each parameter travels along, so that one which no rank used keeps none, as in one process.
        """
        reduced: list[Tensor | None] = [None] * len(parts)
        with torch._C.DisableTorchFunctionSubclass():  # parts, which are asked often
            trained = [number for number, part in enumerate(parts) if part.requires_grad]
            groups = _by_dtype(parts, trained)
        for numbers in groups:
            like = local_of(parts[numbers[0]])
            means, told, told_by = self._means(numbers, gradients, like)
            any_used, marks = (values := told.tolist())[: len(numbers)], values[len(numbers) :]
            self._check(zip(told_by, marks, strict=True), like.dtype)
            for number, mean, used in zip(numbers, means, any_used, strict=True):
                if used:
                    reduced[number] = mean.view(self.shards[number].local_shape)
        return reduced

    def __deepcopy__(self, memo: object) -> Unit:
        """A copied model's parts lie where the model's do."""
        return replace(self)

    def _means(
        self, numbers: Sequence[int], gradients: Sequence[Tensor | None], like: Tensor
    ) -> tuple[Sequence[Tensor], Tensor, Sequence[int]]:
        """Of means this rank's parts, flat; the share of ranks that used each, and all marks; who sent these."""
        flags = like.new_tensor([*(gradients[number] is not None for number in numbers), self._mark(like.dtype)])

        def message(ranks: Sequence[int]) -> Tensor:
            pieces = [
                [*(_for_rank(gradients[number], self.shards[number], rank, like) for number in numbers), flags]
                for rank in ranks
            ]
            return torch.cat([piece for of_rank in pieces for piece in of_rank])

        sizes = [[self.shards[number].size_on(rank) for number in numbers] for rank in range(self.axis.size)]
        lengths = [sum(of_rank) + len(flags) for of_rank in sizes]
        told = scatter_sums(message, lengths, self.axis, dtype=like.dtype, label="sharded gradients")
        flat = (told.sums / self._replicas).to(like.dtype)  # a sum may be too large for half precision
        if self.across is not None:
            flat = all_reduce(flat, self.across, label="sharded gradients").wait()
        *means, any_used = flat.split([*sizes[self.axis.rank], len(numbers)])
        return means, torch.cat([any_used, told.marks]), told.told_by

    @property
    def _replicas(self) -> int:
        """Of how many ranks' gradients the means are."""
        return self.axis.size * (1 if self.across is None else self.across.size)

    def _mark(self, dtype: torch.dtype) -> int:
        """What every message bears, so that one of another unit is known; a number that its dtype can hold."""
        return crc32(self.name.encode()) % _MARKS.get(dtype, 251 if dtype.itemsize > 1 else 8)

    def _check(self, marks: Iterable[tuple[int, float]], dtype: torch.dtype) -> None:
        for rank, mark in marks:
            if mark != self._mark(dtype):
                raise other_branch(f"{self.name!r} on rank {self.axis.rank}, another on rank {rank}")


def joined(units: Sequence[Unit]) -> Unit:
    """Several units of one axis as one, with the parameters of the first, then those of the second, and so on."""
    if len(units) == 1:
        return units[0]
    shards: list[Shard] = []
    places: list[tuple[str, str, int]] = []
    for unit in units:
        places += [(f"{unit.name}.{path}".rstrip("."), name, len(shards) + n) for path, name, n in unit.places]
        shards += unit.shards
    return Unit(", ".join(unit.name for unit in units), units[0].axis, shards, places, units[0].across)


def _by_dtype(tensors: Sequence[Tensor], numbers: Iterable[int]) -> list[list[int]]:
    """Numbers of tensors that can travel together."""
    groups: dict[torch.dtype, list[int]] = {}
    for number in numbers:
        groups.setdefault(tensors[number].dtype, []).append(number)
    return list(groups.values())


def _for_rank(gradient: Tensor | None, shard: Shard, rank: int, like: Tensor) -> Tensor:
    """Of this rank's gradient of a whole what belongs to a rank, flat."""
    if gradient is None:
        return like.new_zeros(shard.size_on(rank))
    used_here(gradient)
    dense = gradient.to_dense() if gradient.layout != torch.strided else gradient
    return dense.narrow(shard.dim, shard.begin_on(rank), shard.length(rank)).reshape(-1).to(like.dtype)
