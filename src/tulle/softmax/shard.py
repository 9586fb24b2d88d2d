"""`Shard`: which rows of an output table this rank scores: its own, if the table is split, else all."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from tulle.comm import lane
from tulle.errors import ModelError
from tulle.mesh import Axis
from tulle.partition import Hashed
from tulle.tables import ColumnSplit, RowSplit, split_of

_LANE = "softmax"


@dataclass(frozen=True, slots=True, eq=False)
class Shard:
    """The part of an output table that lies here.

    Args:
        num_rows: Rows of the whole table.
        split: How it is split; None if all of it is here.
    """

    num_rows: int
    split: RowSplit | None

    @staticmethod
    def of(weight: Tensor) -> Shard:
        """Of a parameter: `[num_rows, width]`, or what a rank has of it.

        Raises:
            ModelError: If it is split by columns.
        """
        split = split_of(weight)
        if isinstance(split, ColumnSplit):
            raise ModelError(
                f"the softmax over {split.name!r} needs whole rows, but that table is split by columns: "
                "give it the placement 'rows'"
            )
        return Shard(len(weight) if split is None else split.num_rows, split)

    @property
    def ranks(self) -> int:
        """Ranks that share the table."""
        return 1 if self.split is None else self.split.axis.size

    @property
    def label(self) -> str:
        """What counters and errors call its exchanges."""
        return "softmax" if self.split is None else self.split.name

    def axis(self) -> Axis | None:
        """On what the ranks that share the table talk, None if there are no others. Every rank must call it."""
        if self.split is None or self.split.axis.size == 1:
            return None
        return lane(self.split.axis, _LANE)

    def locate(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Whether rows lie here, and at which place: two tensors of the shape of `rows`."""
        if self.split is None:
            return torch.ones_like(rows, dtype=torch.bool), rows
        owners, places = self.split.partition.place(rows)
        return owners == self.split.axis.rank, places

    def rows(self, rank: int | None = None) -> tuple[Tensor, Tensor]:
        """The row at each place of a rank (None: this one), and whether there is one: `[places]` each, on the CPU."""
        if self.split is None:
            return torch.arange(self.num_rows), torch.ones(self.num_rows, dtype=torch.bool)
        return _rows_of(self.split.partition, self.split.axis.rank if rank is None else rank)


@lru_cache(maxsize=64)
def _rows_of(partition: Hashed, rank: int) -> tuple[Tensor, Tensor]:
    held, places = partition.held(rank)
    rows = torch.zeros(partition.places, dtype=torch.int64)
    is_held = torch.zeros(partition.places, dtype=torch.bool)
    rows[places], is_held[places] = held, True
    return rows, is_held
