"""Scheme `densify`: a gradient that is sparse by type but hardly in fact is made dense and all-reduced.

*Densifying Assumed-sparse Tensors* (arXiv 1905.04035, section 3): gathering grows with the number of ranks, reducing
does not. Row numbers are told as in `allgather`, at one bit a row of the table or less: a touched row whose values sum
to zero stays touched, as an optimizer with momentum requires (DeepSpeed dropped it, and with it the update).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tulle.comm import Deferred
from tulle.comm import all_reduce as reduce_dense
from tulle.cost import Characteristics, Cost, Network, all_reduce_cost, work_cost
from tulle.mesh import Axis
from tulle.sync.numbers import gather_numbers, numbers_cost
from tulle.sync.table import Table


@dataclass(frozen=True, slots=True, eq=False)
class Route:
    """Which rows any rank touches, and where this rank's lie in the buffer that is all-reduced.

    Args:
        table: The table.
        axis: Whose ranks take part.
        rows: `[union]` the rows of the sum, ascending.
        length: Rows of the buffer: those of the table, or those of the union.
        places: `[rows]` where each of this rank's rows lies in it.
    """

    table: Table
    axis: Axis
    rows: Tensor
    length: int
    places: Tensor

    def all_reduce(self, values: Tensor) -> Deferred[Tensor]:
        """`[rows, width]` of this rank to `[union, width]`. Every rank of the axis must call it."""
        table = self.table
        sent = table.to_wire(values)
        dense = sent.new_zeros(self.length, table.width).index_copy_(0, self.places, sent)
        if not self.length:
            return Deferred(lambda: table.from_wire(dense))
        reduced = reduce_dense(dense, self.axis, label=table.label)

        def finish() -> Tensor:
            whole = reduced.wait()
            return table.from_wire(whole if len(self.rows) == self.length else whole.index_select(0, self.rows))

        return Deferred(finish)


def route(indices: Tensor, table: Table, counts: Sequence[int], axis: Axis) -> Deferred[Route]:
    """Tell every rank which rows this one has; arguments as for `tulle.sync.allgather.route`."""
    gathered = gather_numbers(indices, counts, table.num_rows, table, axis)
    return Deferred(lambda: Route(table, axis, torch.unique(torch.cat(gathered.wait())), table.num_rows, indices))


def cost(characteristics: Characteristics, network: Network, ranks: int) -> Cost:
    """A ring all-reduce of the table, `2 (n - 1) / n M` in `2 (n - 1)` rounds, and the row numbers."""
    looks = characteristics.at(ranks)
    reduced = all_reduce_cost(looks.dense_bytes, network, ranks)
    picked_rows = looks.union_rows if looks.union_rows < looks.num_rows else 0
    work = work_cost(
        network,
        copied_bytes=looks.dense_bytes + picked_rows * looks.values_bytes,
        numbers=sum(looks.rows_per_rank),
    )
    return numbers_cost(looks, network) + reduced + work
