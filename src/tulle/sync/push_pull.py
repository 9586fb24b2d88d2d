"""Push rows to their owners, who sum them, and pull the sums: Zen's parallelism, whoever owns which row.

    rank 0 holds a c d        owner 0: a b      push: each rank's rows to their owners    sum     pull: sums to all
    rank 1 holds a b d        owner 1: c d

    route         which rows each rank holds, as in `allgather`; everything else follows from that
    all_reduce    values to the owners; sums to all, then put in order

Where all row numbers at every rank would be too much, and owners follow from a partition alone, each rank tells only
the owners, and the owners tell what they got (Zen, OSDI'25, section 3.1):

    route         1  how many rows go from each rank to each owner      all-gather, ranks numbers a rank
                  2  places of those rows                               all-to-all
                  3  how many distinct rows each owner now has          all-gather, one number a rank
                  4  their places, as list or bitmap                    all-gather

Neither needs a value, so both are done while the model computes; sizes are off the critical path.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tulle.comm import Deferred, all_gather, all_gather_parts, all_to_all_parts, release
from tulle.cost import NOTHING, Characteristics, Cost, Network, all_gather_cost, exchange_cost, work_cost
from tulle.mesh import Axis
from tulle.partition import Contiguous, Partition, order_by_owner
from tulle.presence import Dealt
from tulle.rows import Merge, inverse, occurrences
from tulle.sync.numbers import gather_numbers, numbers_bytes, numbers_cost, tell_count, told_bytes
from tulle.sync.table import Table

_SORTS, _SORTS_IN_ORDER = 3, 2
"""What `settle` does to each number takes as long as so many sorts; fewer where owners have consecutive rows."""
_WIDE_BYTES = 1024
"""Rows of so many bytes are put in their places as they come, beside the wire; narrower ones at the end, at once, since
to copy each by itself takes four to ten times as long."""
TOLD_BYTES = 256 * 1024
"""Row numbers go to every rank if that takes no rank more than so much: one exchange instead of four."""
Owners = Callable[["Holdings"], Tensor]
"""From what every rank holds to the owner of each row of the union."""


@dataclass(frozen=True, slots=True, eq=False)
class Holdings:
    """Which rows each rank holds, all laid end to end in the order of ranks.

    Args:
        rows: `[union]` the distinct ones, ascending.
        order: `[held]` where the rows that are held lie, by ascending row, and of one row by rank.
        starts: `[union]` where the run of each row begins in `order`.
        holders: `[union]` how many ranks hold it.
        places: `[held]` where in `rows` each lies.
        ranks: `[held]` who holds it.
    """

    rows: Tensor
    order: Tensor
    starts: Tensor
    holders: Tensor
    places: Tensor
    ranks: Tensor

    @staticmethod
    def of(held: Sequence[Tensor]) -> Holdings:
        """From the rows of each rank, ascending."""
        in_order, order = torch.sort(torch.cat(list(held)), stable=True)
        rows, runs, holders = torch.unique_consecutive(in_order, return_inverse=True, return_counts=True)
        places = torch.empty_like(runs)
        places.scatter_(0, order, runs)
        lengths = torch.tensor([len(part) for part in held]).to(rows.device, non_blocking=True)
        ranks = torch.repeat_interleave(torch.arange(len(held), device=rows.device), lengths, output_size=len(order))
        return Holdings(rows, order, holders.cumsum(0) - holders, holders, places, ranks)


@dataclass(frozen=True, slots=True, eq=False)
class Route:
    """Where this rank's rows go, how those that come add up, and where the sums belong.

    Args:
        table: The table.
        axis: Whose ranks take part.
        order: `[rows]` this rank's rows by owner; None where they lie so.
        leaving: Rows that go to each owner.
        coming: Rows that come from each rank.
        most_rows: What the fullest rank holds, the same number on all ranks.
        merge: How those that come add up.
        owned: Distinct rows at each owner.
        rows: `[union]` the rows of the sum, ascending.
        places: `[union]` where in them the sums belong that come, owner after owner; None where they come in order.
    """

    table: Table
    axis: Axis
    order: Tensor | None
    leaving: Sequence[int]
    coming: Sequence[int]
    most_rows: int
    merge: Merge
    owned: Sequence[int]
    rows: Tensor
    places: Tensor | None

    def all_reduce(self, values: Tensor) -> Deferred[Tensor]:
        """`[rows, width]` of this rank to `[union, width]`, bitwise the same on all ranks. Every rank must call it."""
        table = self.table
        by_owner = table.to_wire(values if self.order is None else values.index_select(0, self.order))
        parts, most_bytes = by_owner.split(list(self.leaving)), self.most_rows * by_owner.shape[1] * by_owner.itemsize
        pushed = all_to_all_parts(parts, self.coming, self.axis, label=table.label, most_bytes=most_bytes)

        def finish() -> Tensor:
            received = pushed.wait()
            sums = table.to_wire(self.merge.sum(table.from_wire(received)))
            release(received, self.axis)
            return self._pull(sums)

        return Deferred(finish)

    def _pull(self, sums: Tensor) -> Tensor:
        table = self.table
        if self.places is None or table.width * table.dtype.itemsize < _WIDE_BYTES:
            pulling = all_gather_parts(sums, self.owned, self.axis, label=table.label)
            if self.places is None:
                return table.from_wire(pulling.wait())
            order = inverse(self.places)  # while the wire is busy
            pulled = pulling.wait()
            total = table.from_wire(pulled.index_select(0, order))
            release(pulled, self.axis)
            return total
        total = torch.empty(len(self.rows), table.width, dtype=table.dtype, device=table.device)
        places = self.places.split(list(self.owned))

        def arrived(owner: int, part: Tensor) -> None:
            total.index_copy_(0, places[owner], table.from_wire(part))

        release(all_gather_parts(sums, self.owned, self.axis, label=table.label, arrived=arrived).wait(), self.axis)
        return total


def route(indices: Tensor, table: Table, counts: Sequence[int], axis: Axis, partition: Partition) -> Deferred[Route]:
    """All that can be known from row numbers. Every rank of the axis must call it.

    Args:
        indices: `[counts[axis.rank]]` int64, ascending and distinct.
        table: The table, the same on all ranks.
        counts: Rows of each rank, the same on all ranks.
        axis: Whose ranks take part.
        partition: Who owns which row, the same on all ranks.
    """
    if not _is_told(counts, table.num_rows, table.index_dtype.itemsize):
        return _route_by_owners(indices, table, axis, partition)
    gathered = gather_numbers(indices, counts, table.num_rows, table, axis)

    def owners(held: Holdings) -> Tensor:
        return partition.place(held.rows)[0]

    return Deferred(lambda: settle(gathered.wait(), table, axis, owners, is_ordered=_is_ordered(partition)))


def settle(held: Sequence[Tensor], table: Table, axis: Axis, owners: Owners, *, is_ordered: bool = False) -> Route:
    """The ways of all rows, where every rank knows what every other holds.

    Args:
        held: Rows of each rank, ascending.
        table: The table.
        axis: Whose ranks take part.
        owners: Who owns which row; the same on all ranks.
        is_ordered: Whether owners have consecutive rows, so that nothing need be put in order.
    """
    all_held = Holdings.of(held)
    owner = owners(all_held)
    owner_of_held = owner.index_select(0, all_held.places)
    mine = owner_of_held.split([len(part) for part in held])[axis.rank]
    to_me = owner_of_held == axis.rank
    counted = [occurrences(of_rows, axis.size) for of_rows in (mine, all_held.ranks[to_me], owner)]
    leaving, coming, owned = torch.stack(counted).tolist()  # one wait for a GPU in place of three
    return Route(
        table,
        axis,
        order=None if is_ordered else order_by_owner(mine),
        leaving=leaving,
        coming=coming,
        most_rows=max(map(len, held)),
        merge=Merge.of(all_held.places[to_me]),
        owned=owned,
        rows=all_held.rows,
        places=None if is_ordered else order_by_owner(owner),
    )


def _is_ordered(partition: Partition) -> bool:
    """Whether each owner's rows come before the next owner's."""
    return isinstance(partition, Contiguous)


def _is_told(counts: Sequence[float], num_rows: int, index_bytes: int) -> bool:
    """Whether every rank is told what every other holds; all ranks find the same."""
    most = max((numbers_bytes(count, num_rows, index_bytes) for count in counts), default=0)
    return (len(counts) - 1) * most <= TOLD_BYTES


def _route_by_owners(indices: Tensor, table: Table, axis: Axis, partition: Partition) -> Deferred[Route]:
    """Steps 1 to 4."""
    owner, place = partition.place(indices)
    is_ordered = _is_ordered(partition)
    order = None if is_ordered else order_by_owner(owner)
    matrix = all_gather(occurrences(owner, axis.size), axis, label=table.label)

    def finish() -> Route:
        sizes: list[list[int]] = matrix.wait().tolist()
        leaving, coming = sizes[axis.rank], [row[axis.rank] for row in sizes]
        parts = (place if order is None else place.index_select(0, order)).to(table.index_dtype).split(leaving)
        merge = Merge.of(all_to_all_parts(parts, coming, axis, label=table.label).wait().long())
        owned = tell_count(len(merge.rows), table, axis)
        held = gather_numbers(merge.rows, owned, partition.places, table, axis).wait()
        rows = torch.cat([partition.rows(r, part) for r, part in enumerate(held)])
        places = None
        if not is_ordered:
            rows, came = torch.sort(rows)
            places = inverse(came)
        most_rows = max(map(sum, sizes))
        return Route(table, axis, order, leaving, coming, most_rows, merge, owned, rows, places)

    return Deferred(finish)


def cost(characteristics: Characteristics, network: Network, ranks: int, partition: Partition) -> Cost:
    """Push `(n - 1) / n d M`, pull `(n - 1) / n d^n M`, if the partition is even (Zen, equation 1); else as it is.

    Exact for the rows that the characteristics were measured on: the fullest owner sets the pace.
    """
    looks = characteristics.at(ranks)
    by_owner, owned = looks.spread.owned(partition)
    if _is_told(looks.rows_per_rank, looks.num_rows, looks.index_bytes):
        return settled_cost(looks, network, (by_owner, owned), is_ordered=_is_ordered(partition))
    own = by_owner.own()
    others = ranks - 1
    leaving, coming = by_owner.of_ranks() - own, by_owner.at_owners() - own
    places = [numbers_bytes(rows, partition.places, looks.index_bytes) for rows in owned.tolist()]
    sent_numbers_bytes = leaving * looks.index_bytes + others * torch.tensor(places, dtype=torch.float64)
    sent_numbers_bytes += 8 * others * (ranks + 1)
    reached = by_owner.reached() - (own > 0).long()
    messages = 2 * others + reached + others * (owned > 0).long()
    busiest_bytes = sent_numbers_bytes.max().item() + (coming.max() * looks.index_bytes).item()
    told_s = exchange_cost(busiest_bytes, 0, network, rounds=4).seconds
    told = sent_numbers_bytes, messages, told_s
    return _values_cost(looks, network, (by_owner, owned), told, is_ordered=_is_ordered(partition))


def settled_cost(
    looks: Characteristics, network: Network, dealt: tuple[Dealt, Tensor], *, is_ordered: bool = False
) -> Cost:
    """The cost where every rank is told what every other holds.

    Args:
        looks: What the gradient looks like.
        network: What the axis gives.
        dealt: Rows of each rank at each owner; `[owners]` float64, distinct rows of each owner.
        is_ordered: Whether owners have consecutive rows.
    """
    ranks = len(looks.rows_per_rank)
    numbers, told = told_bytes(looks), numbers_cost(looks, network)
    messages = (ranks - 1) * (numbers > 0).long()
    return _values_cost(looks, network, dealt, (numbers, messages, told.seconds), is_ordered=is_ordered)


def _values_cost(
    looks: Characteristics,
    network: Network,
    dealt: tuple[Dealt, Tensor],
    told: tuple[Tensor, Tensor, float],
    *,
    is_ordered: bool,
) -> Cost:
    """Push and pull of the values, and what was told before: bytes and messages by rank, and seconds."""
    by_owner, owned = dealt
    numbers_sent_bytes, told_messages, told_s = told
    others = len(owned) - 1
    if not others:
        return NOTHING
    own, of_ranks, at_owners = by_owner.own(), by_owner.of_ranks(), by_owner.at_owners()
    leaving, coming = of_ranks - own, at_owners - own
    sent_bytes = numbers_sent_bytes + (leaving + others * owned) * looks.values_bytes
    payer = int(sent_bytes.argmax())
    reached = int(by_owner.reached()[payer]) - int(own[payer] > 0)
    messages = int(told_messages[payer]) + reached + others * int(owned[payer] > 0)
    push_rows = torch.maximum(leaving, coming).max().item()
    push = exchange_cost(push_rows * looks.values_bytes, 0, network, rounds=1)
    pull = all_gather_cost((owned * looks.values_bytes).tolist(), network)
    # Where owners have consecutive rows none are put in order before the push. Sums fill fresh memory in any case.
    ordered_rows = 0.0 if is_ordered else of_ranks.max().item()
    work = work_cost(
        network,
        summed_bytes=at_owners.max().item() * looks.values_bytes,
        copied_bytes=(ordered_rows + owned.max().item() + owned.sum().item()) * looks.values_bytes,
        numbers=(_SORTS_IN_ORDER if is_ordered else _SORTS) * sum(looks.rows_per_rank),
    )
    return Cost(round(sent_bytes[payer].item()), messages, told_s + push.seconds + pull.seconds + work.seconds)
