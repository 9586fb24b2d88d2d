"""`Table`: what every rank knows of one table before any gradient: its name, shape and dtype."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tulle.cost import Characteristics
from tulle.rows import RowSparse


@dataclass(frozen=True, slots=True)
class Table:
    """A parameter `[num_rows, width]` whose gradient comes by rows.

    Args:
        name: The parameter's name in its model.
        num_rows: Rows.
        width: Columns.
        dtype: Of its gradient's values.
        device: Of its gradient.
    """

    name: str
    num_rows: int
    width: int
    dtype: torch.dtype
    device: torch.device

    def empty(self) -> RowSparse:
        """A gradient that touches no row."""
        return RowSparse.trusted(
            torch.empty(0, dtype=torch.int64, device=self.device),
            torch.empty(0, self.width, dtype=self.dtype, device=self.device),
            self.num_rows,
            is_coalesced=True,
        )

    def characteristics(self, rows_per_rank: Sequence[int]) -> Characteristics:
        """What its gradient looks like when each rank holds so many distinct rows."""
        return Characteristics(self.num_rows, self.width, self.dtype.itemsize, tuple(rows_per_rank))

    @property
    def index_dtype(self) -> torch.dtype:
        """Of row numbers on the wire: int32 where every row has one."""
        return torch.int32 if self.num_rows <= 2**31 else torch.int64
