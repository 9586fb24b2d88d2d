"""`Distinct`: the distinct rows that ids look up in several tables, in one numbering, and where ids lie among them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from tulle.tables.split import Split


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


def _version(ids: Tensor) -> int | None:
    """How often a tensor was written; None if nobody counts."""
    return None if ids.is_inference() else ids._version
