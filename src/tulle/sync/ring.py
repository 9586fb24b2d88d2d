"""Scheme `ring`: the rows that any rank touches, laid end to end, are all-reduced as one dense tensor.

What `densify` does, less the rows that nobody touches: the payload grows with the union of rows, not with the number of
ranks, and one collective of the backend carries it, whatever the ids. It helps where ranks hold much the same rows, and
on nccl, whose all-reduce is faster than any exchange of messages.

    route         row numbers of each rank -> every rank: the union
    all_reduce    values, with zeros in the rows of others -> the backend's all-reduce
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tulle.comm import Deferred
from tulle.cost import Characteristics, Cost, Network, all_reduce_cost, work_cost
from tulle.mesh import Axis
from tulle.sync.densify import Route
from tulle.sync.numbers import gather_numbers, numbers_cost
from tulle.sync.table import Table


def route(indices: Tensor, table: Table, counts: Sequence[int], axis: Axis) -> Deferred[Route]:
    """Tell every rank which rows this one has; arguments as for `tulle.sync.allgather.route`."""
    gathered = gather_numbers(indices, counts, table.num_rows, table, axis)

    def finish() -> Route:
        rows = torch.unique(torch.cat(gathered.wait()))
        return Route(table, axis, rows, len(rows), torch.searchsorted(rows, indices))

    return Deferred(finish)


def cost(characteristics: Characteristics, network: Network, ranks: int) -> Cost:
    """A ring all-reduce of the union, `2 (n - 1) / n d^n M` in `2 (n - 1)` rounds, and the row numbers."""
    looks = characteristics.at(ranks)
    union_bytes = looks.union_rows * looks.values_bytes
    reduced = all_reduce_cost(union_bytes, network, ranks) if union_bytes else Cost(0, 0, 0.0)
    work = work_cost(
        network,
        copied_bytes=union_bytes + max(looks.rows_per_rank, default=0) * looks.values_bytes,
        numbers=sum(looks.rows_per_rank),
    )
    return numbers_cost(looks, network) + reduced + work
