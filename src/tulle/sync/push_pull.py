"""Push rows to their owners, who sum them, and pull the sums: Zen's parallelism, for any partition of rows.

    rank 0 holds a c d        owner 0: a b      push: each rank's rows to their owners    sum     pull: sums to all
    rank 1 holds a b d        owner 1: c d

    route         1  how many rows go from each rank to each owner      all-gather, ranks numbers a rank
                  2  places of those rows                               all-to-all
                  3  how many distinct rows each owner now has          all-gather, one number a rank
                  4  their places, as list or bitmap                    all-gather
    all_reduce    5  values to the owners                               all-to-all
                  6  sums to all                                        all-gather

Steps 1 to 4 need no value, so they are done while backward computes; sizes are off the critical path.

Source: Zen (OSDI'25), section 3.1 (Push and Pull), section 3.3 (formats).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tulle.comm import Deferred, all_gather, all_gather_parts, all_to_all_parts
from tulle.cost import Characteristics, Cost, Network, exchange_cost, work_cost
from tulle.mesh import Axis
from tulle.partition import Partition
from tulle.rows import Merge
from tulle.sync.numbers import gather_numbers, numbers_bytes
from tulle.sync.table import Table


@dataclass(frozen=True, slots=True, eq=False)
class Route:
    """Where this rank's rows go, how those that come add up, and where the sums belong.

    Args:
        table: The table.
        axis: Whose ranks take part.
        order: `[rows]` this rank's rows by owner.
        leaving: Rows that go to each owner.
        coming: Rows that come from each rank.
        merge: How those that come add up.
        owned: Distinct rows at each owner.
        rows: `[union]` the rows of the sum, ascending.
        places: `[union]` where each of them lies in the sums of all owners laid end to end; None where they lie so.
    """

    table: Table
    axis: Axis
    order: Tensor
    leaving: Sequence[int]
    coming: Sequence[int]
    merge: Merge
    owned: Sequence[int]
    rows: Tensor
    places: Tensor | None

    def all_reduce(self, values: Tensor) -> Deferred[Tensor]:
        """`[rows, width]` of this rank to `[union, width]`, bitwise the same on all ranks. Every rank must call it."""
        table = self.table
        parts = table.to_wire(values[self.order]).split(list(self.leaving))
        pushed = all_to_all_parts(parts, self.coming, self.axis, label=table.label)

        def finish() -> Tensor:
            sums = self.merge.sum(table.from_wire(pushed.wait()))
            pulled = all_gather_parts(table.to_wire(sums), self.owned, self.axis, label=table.label).wait()
            return table.from_wire(pulled if self.places is None else pulled[self.places])

        return Deferred(finish)


def route(indices: Tensor, table: Table, axis: Axis, partition: Partition) -> Deferred[Route]:
    """Steps 1 to 4: all that can be known from row numbers. Every rank of the axis must call it.

    Args:
        indices: `[rows]` int64, ascending and distinct.
        table: The table, the same on all ranks.
        axis: Whose ranks take part.
        partition: Who owns which row, the same on all ranks.
    """
    owner, place = partition.place(indices)
    order = torch.argsort(owner, stable=True)
    matrix = all_gather(torch.bincount(owner, minlength=axis.size), axis, label=table.label)

    def finish() -> Route:
        sizes: list[list[int]] = matrix.wait().tolist()
        leaving, coming = sizes[axis.rank], [row[axis.rank] for row in sizes]
        parts = place[order].to(table.index_dtype).split(leaving)
        merge = Merge.of(all_to_all_parts(parts, coming, axis, label=table.label).wait().long())
        mine = torch.tensor([len(merge.rows)], device=table.device)
        owned: list[int] = all_gather(mine, axis, label=table.label).wait().view(-1).tolist()
        held = gather_numbers(merge.rows, owned, partition.places, table, axis).wait()
        rows, places = torch.sort(torch.cat([partition.rows(r, part) for r, part in enumerate(held)]))
        is_sorted = bool((places[1:] > places[:-1]).all()) if table.device.type == "cpu" else False
        return Route(table, axis, order, leaving, coming, merge, owned, rows, None if is_sorted else places)

    return Deferred(finish)


def cost(characteristics: Characteristics, network: Network, ranks: int, partition: Partition) -> Cost:
    """Push `(n - 1) / n d M`, pull `(n - 1) / n d^n M`, if the partition is even (Zen, equation 1); else as it is.

    Exact for the rows that the characteristics were measured on: the fullest owner sets the pace.
    """
    if ranks == 1:
        return Cost(0, 0, 0.0)
    looks = characteristics.at(ranks)
    by_owner, owned = looks.spread.owned(partition)
    own = by_owner.diagonal()
    leaving, coming = by_owner.sum(1) - own, by_owner.sum(0) - own
    pulled = [numbers_bytes(rows, partition.places, looks.index_bytes) for rows in owned.tolist()]
    pulled_rows = owned * looks.values_bytes + torch.tensor(pulled, dtype=torch.float64)
    others = ranks - 1
    sizes_bytes = 8 * others
    pushed_bytes = leaving * (looks.index_bytes + looks.values_bytes)
    sent_bytes = pushed_bytes + others * pulled_rows + (ranks + 1) * sizes_bytes
    payer = int(sent_bytes.argmax())
    others_reached = int((by_owner[payer] > 0).sum()) - int(own[payer] > 0)
    messages = 2 * others + 2 * others_reached + 2 * others * int(owned[payer] > 0)
    busiest = torch.maximum(leaving, coming).max().item() * (looks.index_bytes + looks.values_bytes)
    sums_bytes = pulled_rows.sum().item()
    slowest_pull = max(others * pulled_rows.max().item(), sums_bytes - pulled_rows.min().item())
    seconds = exchange_cost(busiest + slowest_pull, messages, network, rounds=6).seconds
    work = work_cost(
        network,
        summed_bytes=by_owner.sum(0).max().item() * looks.values_bytes,
        copied_bytes=max(looks.rows_per_rank) * looks.values_bytes + owned.sum().item() * looks.values_bytes,
    )
    return Cost(round(sent_bytes.max().item()), messages, seconds + work.seconds)
