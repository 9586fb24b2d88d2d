"""Scheme `contiguous`: owners have consecutive rows, as a sparse parameter server has (Zen's Sparse PS, appendix B.1).

In a vocabulary ordered by frequency nearly all touched rows lie with the first owner, whose link then carries nearly
everything. Where rows are even it saves the sort of the sums.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

import tulle.sync.push_pull as push_pull
from tulle.comm import Deferred
from tulle.cost import Characteristics, Cost, Network
from tulle.mesh import Axis
from tulle.partition import Contiguous
from tulle.sync.table import Table


def route(indices: Tensor, table: Table, counts: Sequence[int], axis: Axis) -> Deferred[push_pull.Route]:
    """Settle which rows go where; arguments as for `tulle.sync.allgather.route`."""
    return push_pull.route(indices, table, counts, axis, Contiguous(table.num_rows, axis.size))


def cost(characteristics: Characteristics, network: Network, ranks: int) -> Cost:
    """`2 (n - 1) / n s (d + d^n) M` (Zen, appendix B.1), where skew `s` is that of the rows themselves."""
    return push_pull.cost(characteristics, network, ranks, Contiguous(characteristics.num_rows, ranks))
