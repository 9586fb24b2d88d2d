"""Scheme `balanced`: rows are dealt to owners by a hash, so that no id distribution can unbalance them.

Zen's Balanced Parallelism (OSDI'25, section 3): point to point, one owner a row, a partition that does not look at the
data. What is pushed and pulled, and in which steps, is in `tulle.sync.push_pull`.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

import tulle.sync.push_pull as push_pull
from tulle.comm import Deferred
from tulle.cost import Characteristics, Cost, Network
from tulle.mesh import Axis
from tulle.partition import Hashed
from tulle.sync.table import Table


def route(indices: Tensor, table: Table, counts: Sequence[int], axis: Axis) -> Deferred[push_pull.Route]:
    """Settle which rows go where; arguments as for `tulle.sync.allgather.route`."""
    return push_pull.route(indices, table, counts, axis, Hashed(table.num_rows, axis.size))


def cost(characteristics: Characteristics, network: Network, ranks: int) -> Cost:
    """`(n - 1) / n (1 + gamma^n) d M` (Zen, equation 1) and the row numbers."""
    return push_pull.cost(characteristics, network, ranks, Hashed(characteristics.num_rows, ranks))
