"""Scheme `holders`: each row is summed by one of the ranks that hold it, so that this one's part need not be sent.

Zen's owners are dealt by a hash, because nobody knows who holds what (OSDI'25, section 3.1); a rank pushes nearly all
of its rows. Row numbers are small beside wide rows, though: told to all ranks, they say for each row who holds it.
One of its holders becomes its owner, chosen by hash, so that holders of many common rows share them evenly.

    rows of       rank 0    rank 1    rank 2        pushed by     balanced          holders
    row a         x                                               0 -> owner        nobody
    row b         x         x                                     0, 1 -> owner     the one of 0, 1 that is not owner
    row c         x         x         x                           all -> owner      two of the three

Without overlap nothing is pushed and it is `allgather`; where all ranks hold the same rows it is `balanced`. In
between, `sum over rows of (holders - 1)` rows are pushed, the least with which each row is summed once; the pull is
that of `balanced`. It is not Zen's, and needs numbers at all ranks, `n - 1` times those of one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

import tulle.sync.push_pull as push_pull
from tulle.comm import Deferred
from tulle.cost import Characteristics, Cost, Network
from tulle.mesh import Axis
from tulle.partition import scatter
from tulle.presence import Dealt, Presence
from tulle.sync.numbers import gather_numbers
from tulle.sync.table import Table


def route(indices: Tensor, table: Table, counts: Sequence[int], axis: Axis) -> Deferred[push_pull.Route]:
    """Tell every rank which rows this one has; arguments as for `tulle.sync.allgather.route`."""
    gathered = gather_numbers(indices, counts, table.num_rows, table, axis)

    def owners(held: push_pull.Holdings) -> Tensor:
        of_owner = held.order.index_select(0, held.starts + _chosen(held.rows, held.holders))
        return held.ranks.index_select(0, of_owner)

    return Deferred(lambda: push_pull.settle(gathered.wait(), table, axis, owners))


def _chosen(rows: Tensor, holders: Tensor) -> Tensor:
    """`[union]` which of its holders, by rank, owns each row: drawn by its number."""
    return scatter(rows, 0) % holders


def cost(characteristics: Characteristics, network: Network, ranks: int) -> Cost:
    """Push `sum over rows of (holders - 1)` rows, pull `(n - 1) / n d^n M`, and the row numbers at every rank."""
    looks = characteristics.at(ranks)
    return push_pull.settled_cost(looks, network, looks.spread.once(_dealt, ranks))


def _dealt(spread: Presence, ranks: int) -> tuple[Dealt, Tensor]:
    """Rows by owner: of each rank's, and of all ranks' together."""
    holders = spread.held.sum(0, dtype=torch.int32).long().clamp(min=1)
    is_chosen = spread.held.cumsum(0, dtype=torch.int32) - 1 == _chosen(spread.rows, holders)
    owner = (is_chosen & spread.held).max(0).indices  # argmax takes five times as long
    return spread.dealt(owner, ranks)
