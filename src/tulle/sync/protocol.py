"""What every scheme gives: a way that row numbers settle, the values that go it, and what that costs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from tulle.comm import Deferred
from tulle.cost import Characteristics, Cost, Network
from tulle.mesh import Axis
from tulle.sync.table import Table


class Route(Protocol):
    """What row numbers alone settle about one exchange; the values follow."""

    @property
    def rows(self) -> Tensor:
        """`[union]` the rows of the sum, int64, ascending: known before any value."""
        ...

    def all_reduce(self, values: Tensor) -> Deferred[Tensor]:
        """Sum `[rows, width]` of each rank into `[union, width]`. Every rank of the axis must call it."""
        ...


class Scheme(Protocol):
    """A module: how it settles the rows and moves the values, and what that costs."""

    def route(self, indices: Tensor, table: Table, counts: Sequence[int], axis: Axis) -> Deferred[Route]:
        """Settle where each row goes. Every rank of the axis must call it.

        Args:
            indices: `[counts[axis.rank]]` int64, ascending and distinct.
            table: The table, the same on all ranks.
            counts: Rows of each rank, the same on all ranks.
            axis: Whose ranks take part.
        """
        ...

    def cost(self, characteristics: Characteristics, network: Network, ranks: int) -> Cost:
        """Bytes and messages of the rank that pays most, and the seconds until all have the sum."""
        ...
