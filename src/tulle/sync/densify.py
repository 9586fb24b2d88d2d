"""Scheme `densify`: a gradient that is sparse by type but hardly in fact is made dense and all-reduced.

*Densifying Assumed-sparse Tensors* (arXiv 1905.04035, section 3): gathering grows with the number of ranks,
reducing does not. One more column tells which rows any rank touched: a touched row whose values sum to zero stays
touched, as an optimizer with momentum requires (DeepSpeed dropped it, and with it the update).

    the buffer of one dtype    | values of table 0 | touched 0 | values of table 1 | touched 1 |
                                 num_rows x width    num_rows
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tulle.comm import Deferred
from tulle.comm import all_reduce as reduce_dense
from tulle.cost import Characteristics, Cost, Network, exchange_cost
from tulle.mesh import Axis
from tulle.rows import RowSparse
from tulle.sync.table import Table


def all_reduce(
    gradients: Sequence[RowSparse], tables: Sequence[Table], counts: Sequence[Sequence[int]], axis: Axis
) -> Deferred[list[RowSparse]]:
    """Sum row-sparse gradients over the axis as dense ones. Every rank of the axis must call it.

    Arguments and result are those of every scheme (`tulle.sync.allgather.all_reduce`); `counts` is not needed here.
    """
    del counts
    if axis.size == 1:
        return Deferred(lambda: list(gradients))
    by_dtype: dict[torch.dtype, list[int]] = {}
    for t, table in enumerate(tables):
        by_dtype.setdefault(table.dtype, []).append(t)
    groups = [
        (members, _reduce([gradients[t] for t in members], [tables[t] for t in members], axis))
        for members in by_dtype.values()
    ]

    def finish() -> list[RowSparse]:
        sums = {t: rows for members, pending in groups for t, rows in zip(members, pending.wait(), strict=True)}
        return [sums[t] for t in range(len(tables))]

    return Deferred(finish)


def cost(characteristics: Characteristics, network: Network, ranks: int) -> Cost:
    """A ring all-reduce of the table and its touched column: `2 (n - 1) / n M` in `2 (n - 1)` rounds."""
    touched_bytes = characteristics.num_rows * characteristics.value_bytes
    sent_bytes = 2 * (ranks - 1) / ranks * (characteristics.dense_bytes + touched_bytes)
    return exchange_cost(sent_bytes, 2 * (ranks - 1), network)


def _reduce(gradients: Sequence[RowSparse], tables: Sequence[Table], axis: Axis) -> Deferred[list[RowSparse]]:
    sizes = [table.num_rows * (table.width + 1) for table in tables]
    buffer = torch.zeros(sum(sizes), dtype=tables[0].dtype, device=tables[0].device)
    views = [_halves(part, table) for part, table in zip(buffer.split(sizes), tables, strict=True)]
    for gradient, (values, touched) in zip(gradients, views, strict=True):
        indices = gradient.indices.long()
        values.index_copy_(0, indices, gradient.values)
        touched.index_fill_(0, indices, 1)
    shares = {table.name: size * table.dtype.itemsize for table, size in zip(tables, sizes, strict=True)}
    reduced = reduce_dense(buffer, axis, label=shares)

    def finish() -> list[RowSparse]:
        reduced.wait()
        return [_touched_rows(values, touched) for values, touched in views]

    return Deferred(finish)


def _halves(part: Tensor, table: Table) -> tuple[Tensor, Tensor]:
    values, touched = part.split([table.num_rows * table.width, table.num_rows])
    return values.view(table.num_rows, table.width), touched


def _touched_rows(values: Tensor, touched: Tensor) -> RowSparse:
    indices = touched.nonzero().squeeze(1)
    # Every row touched: the values are the whole buffer, but a copy lets the buffer's other tables go.
    return RowSparse.trusted(indices, values[indices], len(touched), is_coalesced=True)
