"""Scheme `allgather`: every rank gets every rank's rows, and sums them (Zen's AGsparse, OSDI'25 section 2.4).

Rows are coalesced before they are sent, which Horovod does not do, and no part is padded to the longest, as
DeepSpeed's are.

    route         row numbers of each rank -> every rank: what adds up to what is known before any value
    all_reduce    values of each rank -> every rank, which sums them in the order of ranks
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tulle.comm import Deferred, all_gather_parts, release
from tulle.cost import Characteristics, Cost, Network, all_gather_cost, work_cost
from tulle.mesh import Axis
from tulle.rows import Merge
from tulle.sync.numbers import gather_numbers, numbers_cost
from tulle.sync.table import Table


@dataclass(frozen=True, slots=True, eq=False)
class Route:
    """How the rows of every rank add up."""

    table: Table
    axis: Axis
    counts: Sequence[int]
    merge: Merge

    @property
    def rows(self) -> Tensor:
        """`[union]` the rows of the sum, ascending."""
        return self.merge.rows

    def all_reduce(self, values: Tensor) -> Deferred[Tensor]:
        """`[rows, width]` of this rank to `[union, width]`, bitwise the same on all ranks. Every rank must call it."""
        table = self.table
        gathered = all_gather_parts(table.to_wire(values), self.counts, self.axis, label=table.label)

        def finish() -> Tensor:
            received = gathered.wait()
            total = self.merge.sum(table.from_wire(received))
            release(received, self.axis)
            return total

        return Deferred(finish)


def route(indices: Tensor, table: Table, counts: Sequence[int], axis: Axis) -> Deferred[Route]:
    """Tell every rank which rows this one has. Every rank of the axis must call it.

    Args:
        indices: `[counts[axis.rank]]` int64, ascending and distinct.
        table: The table, the same on all ranks.
        counts: Rows of each rank, the same on all ranks.
        axis: Whose ranks take part.
    """
    gathered = gather_numbers(indices, counts, table.num_rows, table, axis)
    return Deferred(lambda: Route(table, axis, counts, Merge.of(torch.cat(gathered.wait()))))


def cost(characteristics: Characteristics, network: Network, ranks: int) -> Cost:
    """`(n - 1) d M` and the row numbers, where the rank with most rows sets the pace; all rounds start at once."""
    looks = characteristics.at(ranks)
    total_rows = sum(looks.rows_per_rank)
    values = all_gather_cost([rows * looks.values_bytes for rows in looks.rows_per_rank], network)
    work = work_cost(
        network,
        summed_bytes=total_rows * looks.values_bytes,
        copied_bytes=looks.union_rows * looks.values_bytes,
        numbers=total_rows,
    )
    return numbers_cost(looks, network) + values + work
