"""`guard_table`: the parameter of a split table is a part of it, and is not to be taken for the whole."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn

from tulle.comm import all_gather_parts, meet_to_read, number_of_all, weighed
from tulle.mesh import Axis
from tulle.parts import Assembled, CutOnce, Reduction, guard, is_followed, local_of
from tulle.tables.gradient import ShardGradient
from tulle.tables.placements import placement_of
from tulle.tables.split import RowSplit, Split, mark

logger = logging.getLogger("tulle")


def guard_table(parameter: nn.Parameter, split: Split) -> None:
    """Let a parameter know which part of a table it holds, and guard it; it stays the object that it is."""
    mark(parameter, split)
    guard(parameter, _Table(split.name, split))


def gradient_of_table(gradient: Tensor, split: Split, axis: Axis) -> ShardGradient:
    """Let the gradient of a table know which part of one it is; it stays the object that it is."""
    table = _Table(split.name, split)
    return ShardGradient.of(gradient, [axis], table.count, whole=table, cuts=table.dims, held=table.held)


@torch.no_grad()
def whole_of_parts(part: Tensor, split: Split) -> Tensor:
    """All of a table, or of what became of it. Every rank of the axis must call it.

    Args:
        part: `[places, ...]`, this rank's; of one that is split by columns `[..., columns]`.
        split: Of the table.
    """
    flat, ranks = part.reshape(-1), range(split.axis.size)
    if isinstance(split, RowSplit):
        every = all_gather_parts(flat, [flat.numel()] * len(ranks), split.axis, label=split.name).wait()
        owner, place = split.partition.place(torch.arange(split.num_rows))
        places = (owner * split.partition.places + place).to(part.device)
        return every.view(-1, *part.shape[1:]).index_select(0, places)
    before = part.shape[:-1]
    sizes = [before.numel() * width for width in split.widths]
    pieces = all_gather_parts(flat, sizes, split.axis, label=split.name).wait().split(sizes)
    return torch.cat([pieces[rank].view(*before, split.widths[rank]) for rank in ranks], dim=-1)


@cache
def _tell(name: str, num_bytes: int) -> None:
    """Say once that a table travels whole, which the loop did not ask for by that name."""
    logger.info(
        "all %.1f MB of the table %s, which is split, were gathered for what reads them by its parameter: its module "
        "fetches single rows, and tulle.ShardedSoftmax scores all of them where they lie",
        num_bytes / 1e6,
        name,
    )


@dataclass(frozen=True, slots=True)
class _Table(CutOnce):
    """A table of which a rank has a part."""

    name: str
    split: Split

    @property
    def dims(self) -> list[int]:
        """Rows, or columns."""
        return [0 if isinstance(self.split, RowSplit) else 1]

    @property
    def shape(self) -> tuple[int, int]:
        """`(rows, width)`."""
        return self.split.shape

    @property
    def local_shape(self) -> Sequence[int]:
        """`(places, width)`, or `(rows, columns)`."""
        return self.split.local_shape

    @property
    def axes(self) -> list[Axis]:
        """The one over which it is split."""
        return [self.split.axis]

    @property
    def count(self) -> int:
        """Of all ranks."""
        rows, width = self.split.shape
        return rows * width

    def held(self) -> Tensor | None:
        """The places that have a row, if some rank has others: what is zero there may be made another number."""
        if not isinstance(self.split, RowSplit):
            return None
        is_full = self.split.local_shape[0] * self.split.axis.size == self.split.shape[0]
        return None if is_full else self.split.rows()[1]

    @property
    def layout(self) -> Hashable:
        """How it is split."""
        return placement_of(self.split), self.split.axis.name, self.split.shape

    def over(self, number: Tensor, op: Reduction) -> Tensor:
        """Over the axis."""
        return weighed(number_of_all(number, op, self.split.axis, self.name), self.split.axis)

    def gather(self, part: Tensor) -> Tensor | None:
        """Told in the log, as it is as large on every rank as it was not to be."""
        if (whole := CutOnce.gather(self, part)) is not None:
            _tell(self.name, whole.nbytes)
        return whole

    def assemble(self, part: Tensor, dim: int) -> Assembled | None:
        """In natural order, without a gradient, which would be as large on all ranks.

        Ranks meet before they send anything, as for a number of all.
        """
        split = self.split
        if is_followed(part) or dim != (0 if isinstance(split, RowSplit) else part.dim() - 1):
            return None
        meet_to_read(self.name, split.axis)
        return whole_of_parts(local_of(part), split), split.take

    def refusal(self, taker: str) -> str:
        """Names the table, how it is split, and the mend."""
        how = placement_of(self.split)
        return (
            f"{taker} was given the table {self.name!r} as if all of it were here, but it is split by {how} over "
            f"{self.split.axis.size} ranks: look rows up with its module, take tulle.ShardedSoftmax for an output "
            f"layer, read it within torch.no_grad(), keep the table whole (another scheme than {how!r} in the plan), "
            "or take its .to_local(), which is this rank's part"
        )

    def refusal_of_gradient(self) -> str:
        """In backward there is no gradient of it."""
        return (
            f"torch.autograd.grad was asked for the gradient of the table {self.name!r}, which is split over "
            f"{self.split.axis.size} ranks: gradients of its rows go to their owners, so call backward() and take "
            ".grad, or keep the table whole in the plan"
        )
