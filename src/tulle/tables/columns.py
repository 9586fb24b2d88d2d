"""Tables split by columns: every rank hears all ranks' row numbers, and serves its columns of their rows.

    forward    distinct rows --numbers--> all --columns--> put abreast, looked up here
    backward   gradients, cut by columns --> all: sum over ranks, optimizer

Any ids load all ranks alike. Each distinct row travels in as many pieces as there are ranks.

Source: Li et al., *EmbRace* (ICPP'22), sparsity-aware hybrid communication.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tulle.cost import NOTHING, Characteristics, Cost, Network, exchange_cost, work_cost
from tulle.rows import Merge
from tulle.tables.blocks import Blocks, Shape
from tulle.tables.split import ColumnSplit

_COUNT_BYTES = 8


@dataclass(frozen=True, slots=True, eq=False)
class Wish:
    """The distinct rows that this rank looks up in a table in one go.

    Args:
        split: The table.
        rows: `[rows]` distinct, ascending.
        positions: `[rows]` where each lies in the order in which they travel: as it is.
        told: Row numbers, the same to every rank.
    """

    split: ColumnSplit
    rows: Tensor
    positions: Tensor
    told: tuple[Tensor, ...]

    @staticmethod
    def of(ids: Tensor, split: ColumnSplit) -> Wish:
        """From the ids of lookups, in any shape."""
        rows = torch.unique(ids)
        numbers = rows.int() if split.num_rows <= 2**31 else rows
        return Wish(split, rows, torch.arange(len(rows), device=rows.device), (numbers,) * split.axis.size)

    def heard(self, asked: list[Tensor]) -> ColumnRoute:
        """With the numbers that each rank has told this one."""
        return ColumnRoute(self.split, len(self.rows), [len(part) for part in asked], torch.cat(asked))


@dataclass(frozen=True, slots=True, eq=False)
class ColumnRoute:
    """How the rows of one wish travel, forward and backward.

    Args:
        split: The table.
        wanted: Rows that this rank wants.
        served: Rows that each rank wants.
        places: `[sum(served)]` which those are, by rank.
    """

    split: ColumnSplit
    wanted: int
    served: list[int]
    places: Tensor

    def merge(self) -> Merge:
        """How the gradients of several ranks for a row add up here."""
        return Merge.of(self.places.long())

    def serve(self, shard: Tensor) -> tuple[Tensor, ...]:
        """Values for each rank, from this rank's columns."""
        return shard.detach().index_select(0, self.places.to(shard.device)).split(self.served)

    def fetched_shapes(self) -> list[Shape]:
        """Of the blocks that come in return."""
        return [(self.wanted, columns) for columns in self.split.widths]

    def assemble(self, blocks: Blocks) -> Tensor:
        """`[rows, width]` of this rank's wish."""
        return blocks.abreast()

    def push(self, gradient: Tensor) -> tuple[Tensor, ...]:
        """Columns of `[rows, width]` gradients for each rank."""
        return tuple(part.contiguous() for part in gradient.split(self.split.widths, dim=1))

    def pushed_shapes(self) -> list[Shape]:
        """Of the blocks that come."""
        return [(rows, self.split.local_shape[1]) for rows in self.served]

    def collect(self, blocks: Blocks) -> Tensor:
        """`[sum(served), columns]` gradients, in the order of `places`."""
        return blocks.stacked()


def cost(characteristics: Characteristics, network: Network, ranks: int) -> Cost:
    """Bytes of the rank that pays most, and predicted seconds, of a step; arguments as for `tulle.tables.rows.cost`."""
    looks = characteristics.at(ranks)
    if ranks == 1:
        return NOTHING
    others = ranks - 1
    rows = torch.tensor(looks.rows_per_rank, dtype=torch.float64)
    total = rows.sum().item()
    part_bytes = looks.values_bytes / ranks
    # Forward this rank's columns of the others' rows, backward the others' columns of its own.
    sent_bytes = (total - rows) * part_bytes + others * rows * part_bytes + others * rows * looks.index_bytes
    sent_bytes += _COUNT_BYTES * others
    payer = int(sent_bytes.argmax())
    is_held = rows > 0
    reached = others * int(is_held[payer])
    messages = others + 2 * reached + int(is_held.sum()) - int(is_held[payer])
    most = rows.max().item()
    told = exchange_cost(max(others * most, total - rows.min().item()) * looks.index_bytes, 0, network, rounds=2)
    busiest_bytes = 2 * max(others * most, total - rows.min().item()) * part_bytes
    values = exchange_cost(busiest_bytes, 0, network, rounds=2)
    work = work_cost(
        network,
        summed_bytes=total * part_bytes,
        copied_bytes=total * part_bytes + 2 * most * looks.values_bytes,  # columns cut and put abreast
        numbers=2 * most + total,
    )
    return Cost(round(sent_bytes[payer].item()), messages, told.seconds + values.seconds + work.seconds)
