"""Tables of one placement, width and dtype that travel as one: their rows in one numbering, table after table.

Wish     what this rank wants:  distinct rows of all tables, ascending; in which order they travel
Route    after numbers were exchanged: how values come, and how gradients go and add up
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from tulle.rows import Merge
from tulle.tables.blocks import Blocks, Shape
from tulle.tables.split import Split

Counts = list[list[int]]
"""Rows by rank and table."""


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """The ids of one table, as they were told.

    Args:
        ids: In any shape.
        version: How often they had been written.
        places: `[ids]` where the row of each lies among the distinct rows of all tables.
    """

    ids: Tensor
    version: int | None
    places: Tensor

    @staticmethod
    def of(ids: Tensor, places: Tensor) -> Source:
        """From ids as they are now."""
        return Source(ids, _version(ids), places)

    def holds(self, ids: Tensor) -> bool:
        """Whether others are the same memory, which nobody has written since."""
        return (
            ids.data_ptr() == self.ids.data_ptr()
            and (ids.shape, ids.stride(), ids.dtype) == (self.ids.shape, self.ids.stride(), self.ids.dtype)
            and self.version is not None
            and self.version == _version(self.ids) == _version(ids)
        )


@dataclass(frozen=True, slots=True, eq=False)
class Distinct:
    """The distinct rows that this rank looks up in the tables of a bundle in one go.

    Args:
        rows: `[rows]` int64, ascending; a row of table t has `bases[t]` added to its number.
        bases: Of each table, and the end.
        starts: Where the rows of each table begin, and the end.
        sources: The ids of each table.
    """

    rows: Tensor
    bases: list[int]
    starts: list[int]
    sources: Sequence[Source]

    @staticmethod
    def of(ids: Sequence[Tensor], splits: Sequence[Split]) -> Distinct:
        """From the ids of lookups in each table, in any shape.

        Raises:
            IndexError: If a table has no such row.
            TypeError: If ids are no whole numbers.
        """
        for one, split in zip(ids, splits, strict=True):
            if one.dtype not in (torch.int32, torch.int64):
                raise TypeError(f"ids of the table {split.name!r} are {one.dtype}, expected int32 or int64")
        bases = [0, *accumulate(split.num_rows for split in splits)]
        keys = [one.reshape(-1).long() + base for one, base in zip(ids, bases, strict=False)]
        rows, found = torch.unique(keys[0] if len(keys) == 1 else torch.cat(keys), return_inverse=True)
        if len(ids) == 1:
            starts = [0, len(rows)]
        else:
            starts = torch.searchsorted(rows, torch.tensor(bases, device=rows.device)).tolist()
        places = found.split([one.numel() for one in ids])
        distinct = Distinct(rows, bases, starts, [*map(Source.of, ids, places)])
        distinct._check(ids, splits)
        return distinct

    def _check(self, ids: Sequence[Tensor], splits: Sequence[Split]) -> None:
        for one, split in zip(ids, splits, strict=True):
            if one.numel():
                low, high = (int(bound) for bound in one.aminmax()) if len(splits) > 1 else self.rows[[0, -1]].tolist()
                if low < 0 or high >= split.num_rows:
                    raise IndexError(
                        f"index out of range: the table {split.name!r} was asked for row {low if low < 0 else high} on "
                        f"rank {split.axis.rank}, expected rows 0..{split.num_rows - 1}: check the vocabulary that "
                        "made the ids, or make the table larger"
                    )

    def lengths(self) -> list[int]:
        """Rows of each table."""
        return [end - start for start, end in pairwise(self.starts)]

    def of_table(self, table: int) -> Tensor:
        """The rows of one table, as they are numbered here."""
        return self.rows[self.starts[table] : self.starts[table + 1]]

    def places(self, table: int, ids: Tensor, *, is_checked: bool) -> Tensor:
        """Where ids of one table lie among its rows, in their shape.

        Args:
            table: Its number here.
            ids: Some of those that were told.
            is_checked: Whether the very tensor that was told is looked through as others are.

        Raises:
            KeyError: If one was not told.
        """
        source = self.sources[table]
        if not is_checked and source.holds(ids):
            return source.places.view(ids.shape) - self.starts[table]
        rows, keys = self.of_table(table), (ids + self.bases[table]).long().contiguous()
        places = torch.searchsorted(rows, keys).clamp_(max=max(0, len(rows) - 1))
        if keys.numel() and not (len(rows) and torch.equal(rows[places], keys)):
            raise KeyError(f"not all of these ids were told of table {table}")
        return places

    def tables(self) -> Tensor:
        """`[rows]` the table of each."""
        lengths = torch.tensor(self.lengths())
        return torch.repeat_interleave(lengths.to(self.rows.device), output_size=len(self.rows))

    def numbers(self, tables: Tensor) -> Tensor:
        """`[rows]` the number of each in its table."""
        if len(self.bases) == 2:
            return self.rows
        return self.rows - torch.tensor(self.bases[:-1], device=self.rows.device)[tables]


@dataclass(frozen=True, slots=True, eq=False)
class Wish:
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
        """`[rows, width]` of this rank's wish, in the order in which rows travel."""

    @abstractmethod
    def push(self, gradient: Tensor) -> Sequence[Tensor]:
        """Parts of `[rows, width]` gradients for each rank."""

    @abstractmethod
    def push_counts(self, counts: Tensor) -> Sequence[Tensor]:
        """Parts of `[rows, 1]` for each rank: one number a row, wherever its gradient goes."""

    def pushed_shapes(self) -> list[Shape]:
        """Of the blocks of gradients that come: of the rows of `places`."""
        return [(sum(of_rank), self.splits[0].local_shape[1]) for of_rank in self.served]


def _version(ids: Tensor) -> int | None:
    """How often a tensor was written; None if nobody counts."""
    return None if ids.is_inference() else ids._version


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
