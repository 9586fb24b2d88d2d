"""`Distinct`: the distinct rows that ids look up in several tables, in one numbering, and where ids lie among them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from tulle.tables.split import Split


@dataclass(frozen=True, slots=True, eq=False)
class Ids:
    """What is looked up in one table, to be worked on in another thread.

    Args:
        given: The ids, in any shape.
        version: How often they had been written.
        copied: As they were then.
    """

    given: Tensor
    version: int | None
    copied: Tensor

    @staticmethod
    def of(ids: Tensor) -> Ids:
        """From ids as they are now."""
        given = ids.detach()
        return Ids(given, _version(given), given.clone())

    def are(self, ids: Tensor) -> bool:
        """Whether others are the same memory, which nobody has written since."""
        return (
            ids.data_ptr() == self.given.data_ptr()
            and (ids.shape, ids.stride(), ids.dtype) == (self.given.shape, self.given.stride(), self.given.dtype)
            and self.version is not None
            and self.version == _version(self.given) == _version(ids)
        )


@dataclass(frozen=True, slots=True, eq=False)
class Distinct:
    """The distinct rows that this rank looks up in the tables of a bundle in one go.

    Args:
        rows: `[rows]` int64, ascending; a row of table t has `bases[t]` added to its number.
        bases: Of each table, and the end.
        starts: Where the rows of each table begin, and the end.
        ids: Of each table.
        among: Of each, where the row of each id lies among the rows of all tables.
    """

    rows: Tensor
    bases: list[int]
    starts: list[int]
    ids: Sequence[Ids]
    among: Sequence[Tensor]

    @staticmethod
    def of(ids: Sequence[Ids], splits: Sequence[Split]) -> Distinct:
        """From the ids of lookups in each table.

        Raises:
            IndexError: If a table has no such row.
            TypeError: If ids are no whole numbers.
        """
        copied = [one.copied for one in ids]
        for one, split in zip(copied, splits, strict=True):
            if one.dtype not in (torch.int32, torch.int64):
                raise TypeError(f"ids of the table {split.name!r} are {one.dtype}, expected int32 or int64")
        bases = [0, *accumulate(split.num_rows for split in splits)]
        keys = [one.reshape(-1).long() + base for one, base in zip(copied, bases, strict=False)]
        rows, found = torch.unique(keys[0] if len(keys) == 1 else torch.cat(keys), return_inverse=True)
        is_one = len(ids) == 1
        starts = [0, len(rows)] if is_one else torch.searchsorted(rows, _sent(bases, rows.device)).tolist()
        distinct = Distinct(rows, bases, starts, ids, found.split([one.numel() for one in copied]))
        distinct._check(copied, splits)
        return distinct

    def _check(self, ids: Sequence[Tensor], splits: Sequence[Split]) -> None:
        asked = [(one, split) for one, split in zip(ids, splits, strict=True) if one.numel()]
        if not asked:
            return
        is_one = len(ids) == 1
        bounds = (self.rows[0], self.rows[-1]) if is_one else [end.long() for one, _ in asked for end in one.aminmax()]
        ends = iter(torch.stack([*bounds]).tolist())  # of all tables: a GPU is waited for once
        for _, split in asked:
            low, high = next(ends), next(ends)
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
        if not is_checked and self.ids[table].are(ids):
            return self.among[table].view(ids.shape) - self.starts[table]
        rows, keys = self.of_table(table), (ids.long() + self.bases[table]).contiguous()
        places = torch.searchsorted(rows, keys).clamp_(max=max(0, len(rows) - 1))
        if keys.numel() and not (len(rows) and torch.equal(rows.take(places), keys)):
            raise KeyError(f"not all of these ids were told of table {table}")
        return places

    def tables(self) -> Tensor:
        """`[rows]` the table of each."""
        return torch.repeat_interleave(_sent(self.lengths(), self.rows.device), output_size=len(self.rows))

    def numbers(self, tables: Tensor) -> Tensor:
        """`[rows]` the number of each in its table."""
        if len(self.bases) == 2:
            return self.rows
        return self.rows - _sent(self.bases[:-1], self.rows.device)[tables]


def _sent(numbers: Sequence[int], device: torch.device) -> Tensor:
    """Numbers on a device, for which the host does not wait."""
    return torch.tensor(numbers).to(device, non_blocking=True)


def _version(ids: Tensor) -> int | None:
    """How often a tensor was written; None if nobody counts."""
    return None if ids.is_inference() else ids._version
