"""Tables of one placement, width and dtype that travel as one: their rows in one numbering, table after table.

Request  what this rank wants:  distinct rows of all tables, ascending; in which order they travel
Route    after numbers were exchanged: how values come, and how gradients go and add up
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from tulle.rows import Merge, inverse
from tulle.tables.blocks import Blocks, Shape
from tulle.tables.distinct import Distinct
from tulle.tables.split import Split

Counts = list[list[int]]
"""Rows by rank and table."""


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """What this rank wants of a bundle, and what it tells the others of it.

    Args:
        splits: The tables.
        distinct: The rows.
        positions: `[rows]` where each comes in the order in which they travel.
        counts: How many rows of each table every rank is told.
        told: Their numbers, to each rank, table after table.
    """

    splits: Sequence[Split]
    distinct: Distinct
    positions: Tensor
    counts: Counts
    told: Sequence[Tensor]

    def __len__(self) -> int:
        return len(self.distinct.rows)

    def order(self, table: int) -> Tensor:
        """`[rows]` where each row of a table, ascending, comes among those that travel with it."""
        return self.positions[self.distinct.starts[table] : self.distinct.starts[table + 1]]

    def travelling(self, by_table: Sequence[Tensor]) -> Tensor:
        """`[rows, ...]` in the order in which rows travel, of what is given for those of each table, ascending."""
        whole = torch.cat(list(by_table))
        return whole.index_select(0, inverse(self.positions).to(whole.device))


@dataclass(frozen=True, slots=True, eq=False)
class Sums:
    """How the gradients of several ranks add up at an owner.

    Args:
        merge: Of places in this rank's parts, numbered through table after table.
        bases: Where the places of each table begin in that numbering, and the end.
        sizes: Distinct places of each table.
    """

    merge: Merge
    bases: list[int]
    sizes: list[int]

    def by_table(self, summed: Tensor) -> Sequence[Tensor]:
        """What was summed, by table."""
        return summed.split(self.sizes)

    def places(self) -> list[Tensor]:
        """`[rows]` places in this rank's part of each table, ascending."""
        return [part - base for part, base in zip(self.by_table(self.merge.rows), self.bases[:-1], strict=True)]


@dataclass(frozen=True, slots=True, eq=False)
class Route(ABC):
    """How the rows of a bundle travel, forward and backward.

    Args:
        splits: The tables.
        rows: Distinct rows that this rank wants.
        wanted: How many of each table it has told every rank.
        served: How many of each table every rank wants here.
        places: `[sum(served)]` where in this rank's parts those lie, by rank, then by table.
        most_rows: What the fullest rank wants, the same number on all ranks.
    """

    splits: Sequence[Split]
    rows: int
    wanted: Counts
    served: Counts
    places: Tensor
    most_rows: int

    def rows_served(self) -> dict[str, int]:
        """How many rows of each table go to the other ranks, forward."""
        return rows_by_table(self.splits, self.served)

    def rows_pushed(self) -> dict[str, int]:
        """The same of gradients, backward."""
        return rows_by_table(self.splits, self.wanted)

    def values_bytes(self, dtype: torch.dtype) -> int:
        """About what the fullest rank sends of values, or of gradients."""
        return self.most_rows * self.splits[0].width * dtype.itemsize

    def serve(self, reads: Sequence[Callable[[Tensor], Tensor]]) -> tuple[Tensor, ...]:
        """Values for each rank, from what gives, for each table, the rows that lie at places of this rank's part."""
        totals = [sum(of_rank) for of_rank in self.served]
        if len(reads) == 1:
            return reads[0](self.places).split(totals)
        pieces: list[Sequence[Tensor]] = []
        for read, places in zip(reads, self.places_by_table(), strict=True):
            pieces.append(read(torch.cat(places)).split([len(one) for one in places]))
        return torch.cat([of_table[rank] for rank in range(len(totals)) for of_table in pieces]).split(totals)

    def places_by_table(self) -> list[list[Tensor]]:
        """The places that each rank wants, by table and rank."""
        pieces = self.places.split([count for of_rank in self.served for count in of_rank])
        tables = len(self.splits)
        return [[*pieces[table::tables]] for table in range(tables)]

    def sums(self) -> Sums:
        """How the gradients of several ranks for a row add up here."""
        bases = [0, *accumulate(split.local_shape[0] for split in self.splits)]
        places = self.places.long()
        if len(self.splits) > 1:
            counts = torch.tensor(self.served, device=places.device)
            starts = torch.tensor(bases[:-1], device=places.device).expand_as(counts)
            places = places + torch.repeat_interleave(starts.reshape(-1), counts.reshape(-1), output_size=len(places))
        merge = Merge.of(places)
        if len(self.splits) == 1:
            return Sums(merge, bases, [len(merge.rows)])
        starts = torch.searchsorted(merge.rows, torch.tensor(bases, device=places.device))
        return Sums(merge, bases, starts.diff().tolist())

    def only(self, wanted: Tensor, served: Tensor) -> Self:
        """The way of some of the rows alone: masks of those that this rank wants, as they travel, and of `places`."""
        return replace(
            self,
            rows=int(wanted.sum()),
            wanted=self.count(wanted),
            served=count_in(served, self.served),
            places=self.places[served],
        )

    @abstractmethod
    def count(self, wanted: Tensor) -> Counts:
        """How many of the rows in a mask of those that this rank wants every rank is told."""

    @abstractmethod
    def fetched_shapes(self) -> list[Shape]:
        """Of the blocks of values that come."""

    @abstractmethod
    def assemble(self, blocks: Blocks) -> Tensor:
        """`[rows, width]` of this rank's request, in the order in which rows travel."""

    @abstractmethod
    def push(self, gradient: Tensor) -> Sequence[Tensor]:
        """Parts of `[rows, width]` gradients for each rank."""

    @abstractmethod
    def push_counts(self, counts: Tensor) -> Sequence[Tensor]:
        """Parts of `[rows, 1]` for each rank: one number a row, wherever its gradient goes."""

    def pushed_shapes(self) -> list[Shape]:
        """Of the blocks of gradients that come: of the rows of `places`."""
        return [(sum(of_rank), self.splits[0].local_shape[1]) for of_rank in self.served]


def as_told(numbers: Tensor, limit: int) -> Tensor:
    """Numbers below a limit as they travel: int32 where each has one."""
    return numbers.int() if limit <= 2**31 else numbers


def rows_by_table(splits: Sequence[Split], counts: Counts) -> dict[str, int]:
    """Rows of each table, by its name, that all ranks but this one have to do with."""
    others = [of_rank for rank, of_rank in enumerate(counts) if rank != splits[0].axis.rank]
    return {split.name: sum(of_rank[table] for of_rank in others) for table, split in enumerate(splits)}


def count_in(mask: Tensor, counts: Counts) -> Counts:
    """How many rows of each rank and table are in a mask over all of them, in this order.

    Example:
        >>> count_in(torch.tensor([True, False, True, True]), [[2, 1], [0, 1]])
        [[1, 1], [0, 1]]
    """
    ends = torch.tensor([0, *accumulate(count for of_rank in counts for count in of_rank)], device=mask.device)
    return F.pad(mask.cumsum(0), (1, 0))[ends].diff().view(len(counts), -1).tolist()
