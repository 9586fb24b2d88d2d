"""`RowSplit` and `ColumnSplit`: which part of a table a rank holds, as plain values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tulle.mesh import Axis
from tulle.partition import Hashed
from tulle.parts import local_of

_BLOCK_BYTES = 8 * 1024 * 1024
"""Of rows that are copied at once."""


@dataclass(frozen=True, slots=True, eq=False)
class RowSplit:
    """A table whose rows are dealt to the ranks of an axis by a bijection of row numbers (`tulle.partition.Hashed`).

    A rank holds `[places, width]`: row `rows[i]` lies at place i of it. A few places are empty and stay zero.

    Args:
        name: The parameter's name in the model.
        num_rows: Rows of the table.
        width: Its columns.
        axis: Whose ranks hold it.

    Source: Zen (OSDI'25, section 3.2) for the data-independent partition; that it is a bijection,
    so that owner and place are arithmetic, is our own (docs/design/split-tables.md).
    """

    name: str
    num_rows: int
    width: int
    axis: Axis

    @property
    def partition(self) -> Hashed:
        """Owner and place of each row."""
        return Hashed(self.num_rows, self.axis.size)

    @property
    def shape(self) -> tuple[int, int]:
        """Of the whole table."""
        return self.num_rows, self.width

    @property
    def local_shape(self) -> tuple[int, int]:
        """Of a rank's part: the same on all ranks."""
        return self.partition.places, self.width

    def shape_of_whole(self, shape: Sequence[int]) -> tuple[int, ...] | None:
        """Of what has something for each row of a rank's part, by the shape of that; None of what has not."""
        return (self.num_rows, *shape[1:]) if tuple(shape[:1]) == (self.partition.places,) else None

    def shape_of_part(self, shape: Sequence[int]) -> tuple[int, ...] | None:
        """The reverse: what `take` gives of a whole of this shape."""
        return (self.partition.places, *shape[1:]) if tuple(shape[:1]) == (self.num_rows,) else None

    def rows(self, owner: int | None = None) -> tuple[Tensor, Tensor]:
        """Rows that a rank holds (this one, if None), and the place of each at it: two `[held]` int64 tensors."""
        return self.partition.held(self.axis.rank if owner is None else owner)

    def take(self, whole: Tensor) -> Tensor:
        """This rank's part of the whole table, `[num_rows, ...]` to `[places, ...]`, row-sparse if the whole is."""
        if whole.is_sparse:
            rows, values = _stored(whole)
            owner, places = self.partition.place(rows)
            is_mine = owner == self.axis.rank
            return _by_rows(places[is_mine], values[is_mine], self.partition.places)
        rows, places = self.rows()
        rows, places = rows.to(whole.device), places.to(whole.device)
        part = whole.new_zeros(self.partition.places, *whole.shape[1:])
        block = max(1, _BLOCK_BYTES // max(1, whole[:1].nbytes))  # all at once would take the part's memory once more
        for some_rows, some_places in zip(rows.split(block), places.split(block), strict=True):
            part.index_copy_(0, some_places, local_of(whole).index_select(0, some_rows))
        return part

    def put(self, part: Tensor, first_row: int, chunk: Tensor) -> None:
        """Write what belongs to this rank of the consecutive rows `chunk` into its part."""
        rows = torch.arange(first_row, first_row + len(chunk))
        owner, places = self.partition.place(rows)
        is_mine = owner == self.axis.rank
        part[places[is_mine].to(part.device)] = chunk[is_mine.to(chunk.device)].to(part.device)


@dataclass(frozen=True, slots=True, eq=False)
class ColumnSplit:
    """A table of which every rank holds all rows and `width / ranks` columns (EmbRace, ICPP'22).

    Any ids load all ranks alike. The first `width % ranks` ranks hold a column more.

    Args:
        name: The parameter's name in the model.
        num_rows: Rows of the table.
        width: Its columns, at least one a rank.
        axis: Whose ranks hold it.
    """

    name: str
    num_rows: int
    width: int
    axis: Axis

    @property
    def shape(self) -> tuple[int, int]:
        """Of the whole table."""
        return self.num_rows, self.width

    @property
    def local_shape(self) -> tuple[int, int]:
        """Of this rank's part."""
        return self.num_rows, self.widths[self.axis.rank]

    def shape_of_whole(self, shape: Sequence[int]) -> tuple[int, ...] | None:
        """Of what has the shape of a rank's part; None of what has another."""
        return self.shape if tuple(shape) == self.local_shape else None

    def shape_of_part(self, shape: Sequence[int]) -> tuple[int, ...] | None:
        """The reverse: what `take` gives of a whole of this shape."""
        return self.local_shape if tuple(shape) == self.shape else None

    @property
    def widths(self) -> list[int]:
        """Columns of each rank."""
        least, more = divmod(self.width, self.axis.size)
        return [least + (rank < more) for rank in range(self.axis.size)]

    @property
    def first_column(self) -> int:
        """Where this rank's columns begin."""
        return sum(self.widths[: self.axis.rank])

    def take(self, whole: Tensor) -> Tensor:
        """This rank's columns of the whole table, `[..., width]` to `[..., columns]`, row-sparse if it is."""
        own = slice(self.first_column, self.first_column + self.local_shape[1])
        if whole.is_sparse:
            rows, values = _stored(whole)
            return _by_rows(rows, values[:, own].contiguous(), self.num_rows)
        return local_of(whole)[..., own].clone()

    def put(self, part: Tensor, first_row: int, chunk: Tensor) -> None:
        """Write what belongs to this rank of the consecutive rows `chunk` into its part."""
        first = self.first_column
        part[first_row : first_row + len(chunk)] = chunk[:, first : first + self.local_shape[1]].to(part.device)


Split = RowSplit | ColumnSplit
_SPLIT = "_tulle_split"
"""The attribute by which a parameter knows that it is a part of a table."""


def mark(parameter: Tensor, split: Split) -> None:
    """Let a parameter know which part of a table it holds."""
    setattr(parameter, _SPLIT, split)


def split_of(tensor: Tensor) -> Split | None:
    """The split of a parameter that is a part of a table, or None."""
    return getattr(tensor, _SPLIT, None)


def _stored(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """`[stored]` row numbers, each once, and `[stored, ...]` values of a row-sparse tensor."""
    stored = local_of(tensor).coalesce()
    return stored.indices()[0], stored.values()


def _by_rows(rows: Tensor, values: Tensor, num_rows: int) -> Tensor:
    return torch.sparse_coo_tensor(rows[None], values, (num_rows, *values.shape[1:]))
