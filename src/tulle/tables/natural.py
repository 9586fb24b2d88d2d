"""Rows of a split table in natural order, as files and plain PyTorch have them: from the owners, and back.

    owners, by hash          rank 0: rows 5 0 3      rank 1: rows 1 4 2
    collect                  rank 0: rows 0 1 2      rank 1: rows 3 4 5      any ranges of rows, one a rank
    deliver                  back to the owners

What travels at a time is what the ranges ask for: a table that no rank could hold passes through in blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

import torch
from torch import Tensor

from tulle.comm import all_to_all_parts, lane
from tulle.mesh import Axis
from tulle.partition import Contiguous, order_by_owner
from tulle.parts import local_of
from tulle.rows import inverse
from tulle.tables.split import ColumnSplit, RowSplit, Split

BLOCK_BYTES = 8 * 1024 * 1024
"""How much of a table one rank collects or delivers at a time; about five times as much is then in memory."""
_LARGEST_INT32 = 2**31
_LANE = "natural order"  # beside what training sends


class RowOrder:
    """The rows that this rank owns of a row-split table, ascending, with their places: 8 bytes a row.

    Found out at first use, it serves the parameter and every optimizer state of its shape.

    Args:
        split: The table.
    """

    def __init__(self, split: RowSplit) -> None:
        self.split = split

    def collect(self, part: Tensor, wanted: Sequence[range]) -> Tensor:
        """Rows of one range for each rank, in natural order. Every rank of the axis must call it, alike.

        Args:
            part: `[places, width]`, what this rank owns.
            wanted: Rows that each rank is to get; ranges may be empty, and may overlap.

        Returns:
            `[len(wanted[rank]), width]`, on the device of `part`.
        """
        position, lengths = self._by_owner(wanted[self.split.axis.rank], part)
        owned = self._owned(wanted, part)
        came = self._exchange([local_of(part).index_select(0, places) for places in owned], lengths)
        return came.index_select(0, inverse(position))

    @cached_property
    def _axis(self) -> Axis:
        return lane(self.split.axis, _LANE)

    @cached_property
    def _held(self) -> tuple[Tensor, Tensor]:
        rows, places = self.split.rows()
        rows, order = rows.sort()
        number = torch.int32 if self.split.num_rows < _LARGEST_INT32 else torch.int64
        return rows.to(number), places[order].to(number)

    @torch.no_grad()
    def deliver(self, block: Tensor, part: Tensor, held: Sequence[range]) -> None:
        """Give rows in natural order to their owners: the reverse of `collect`. Every rank must call it, alike.

        Args:
            block: `[len(held[rank]), width]`, the rows that this rank holds.
            part: `[places, width]`, what this rank owns: overwritten where rows come.
            held: Rows that each rank holds; no row twice.
        """
        position, lengths = self._by_owner(held[self.split.axis.rank], part)
        places = self._owned(held, part)
        by_owner = block.to(part.device).index_select(0, position)
        came = self._exchange(list(by_owner.split(lengths)), [len(one) for one in places])
        part[torch.cat(places)] = came

    def _owned(self, ranges: Sequence[range], part: Tensor) -> list[Tensor]:
        """Places of the rows that this rank owns within each range."""
        rows, places = self._held
        bounds = torch.tensor([[one.start, one.stop] for one in ranges], dtype=rows.dtype)
        firsts, lasts = torch.searchsorted(rows, bounds).T.tolist()
        return [places[first:last].to(part.device) for first, last in zip(firsts, lasts, strict=True)]

    def _by_owner(self, rows: range, part: Tensor) -> tuple[Tensor, list[int]]:
        """Positions of a range's rows in the order in which they travel, by owner, and how many each owner has."""
        owner, _ = self.split.partition.place(torch.arange(rows.start, rows.stop))
        position = order_by_owner(owner).to(part.device)
        return position, torch.bincount(owner, minlength=self.split.axis.size).tolist()

    def _exchange(self, parts: list[Tensor], lengths: list[int]) -> Tensor:
        return all_to_all_parts(parts, lengths, self._axis, label=self.split.name).wait()


class ColumnOrder:
    """The same for a table that is split by columns: rows lie in natural order, of each a part at every rank.

    Args:
        split: The table.
    """

    def __init__(self, split: ColumnSplit) -> None:
        self.split = split

    def collect(self, part: Tensor, wanted: Sequence[range]) -> Tensor:
        """Rows of one range for each rank, in natural order, whole; see `RowOrder.collect`.

        Args:
            part: `[rows, columns]`, this rank's columns.
            wanted: Rows that each rank is to get.
        """
        axis = lane(self.split.axis, _LANE)
        rows = len(wanted[axis.rank])
        parts = [local_of(part)[one.start : one.stop].reshape(-1) for one in wanted]
        lengths = [rows * columns for columns in self.split.widths]
        came = all_to_all_parts(parts, lengths, axis, label=self.split.name).wait().split(lengths)
        columns = zip(came, self.split.widths, strict=True)
        return torch.cat([one.view(rows, width) for one, width in columns], dim=1)


def natural_order(split: Split) -> RowOrder | ColumnOrder:
    """What collects a split table's rows."""
    return RowOrder(split) if isinstance(split, RowSplit) else ColumnOrder(split)


def chunk_of(split: RowSplit, rank: int) -> range:
    """The rows that a rank has in a file: contiguous, an equal share of all."""
    return _within(split.num_rows, rank * _chunk_rows(split), _chunk_rows(split))


def blocks_of_chunks(split: RowSplit, block_rows: int) -> Iterator[list[range]]:
    """Each rank's chunk in blocks of at most `block_rows`: one range for each rank, step by step; late ones are empty.

    Example:
        >>> from types import SimpleNamespace
        >>> list(blocks_of_chunks(RowSplit("words", num_rows=7, width=2, axis=SimpleNamespace(size=2)), 3))
        [[range(0, 3), range(4, 7)], [range(3, 4), range(7, 7)]]
    """
    for begin in range(0, _chunk_rows(split), block_rows):
        yield [chunk_of(split, rank)[begin : begin + block_rows] for rank in range(split.axis.size)]


def block_rows_of(row_bytes: int) -> int:
    """Rows of a block."""
    return max(1, BLOCK_BYTES // max(1, row_bytes))


def _chunk_rows(split: RowSplit) -> int:
    return Contiguous(split.num_rows, split.axis.size).places


def _within(num_rows: int, first: int, length: int) -> range:
    return range(min(first, num_rows), min(first + length, num_rows))
