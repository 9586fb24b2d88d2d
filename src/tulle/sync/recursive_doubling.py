"""Scheme `recursive_doubling`: ranks sum with a partner, pairs with a pair, and so on: `log2 n` rounds.

SparCML's SSAR_Recursive_double (SC'19, section 5.3.1), which is Zen's Hierarchical Centralization (OSDI'25, section
2.4). Rows that many ranks hold are merged on the way, so a rank receives them `log2 n` times at most, not `n - 1`.

    ranks 6    fold      round 1    round 2    return
    0          gets 4    with 1     with 2     to 4
    1          gets 5    with 0     with 3     to 5
    2                    with 3     with 0
    3                    with 2     with 1
    4          to 0                            gets 0
    5          to 1                            gets 1

    route         row numbers of each rank -> every rank: which rows each round sends, and how they add up
    all_reduce    values, round by round

Row numbers go ahead, so that no round waits for a size. SparCML becomes dense on the way where row numbers would cost
more than zeros; here they are not in the rounds, and no message is ever longer than the table. Where both partners hold
the same rows (the whole table at the latest) their sum is a plain addition; to fill up rows that are nearly the whole
table with zeros, only to get there sooner, takes longer than one addition by index (`docs/design/sparse-gradients.md`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tulle.comm import Deferred, Pending, all_gather_parts, release
from tulle.cost import Characteristics, Cost, Network, work_cost
from tulle.mesh import Axis
from tulle.presence import Presence
from tulle.rows import Merge
from tulle.sync.numbers import gather_numbers, numbers_cost, told_bytes
from tulle.sync.table import Table


@dataclass(frozen=True, slots=True, eq=False)
class Round:
    """What two ranks send each other, and how it adds up.

    Args:
        pair: The two, the lower rank first.
        lengths: Rows that each of them sends.
        merge: How the rows of both add up; None where both hold the same rows.
    """

    pair: Axis
    lengths: tuple[int, int]
    merge: Merge | None

    def start(self, values: Tensor, table: Table) -> Pending[Tensor]:
        """Send, and get what both sent, the lower rank's rows first: both ranks then add alike, bit for bit."""
        return all_gather_parts(table.to_wire(values), self.lengths, self.pair, label=table.label)

    def take(self, under_way: Pending[Tensor], table: Table) -> Tensor:
        """Wait for the rows of both, and add them up."""
        received = under_way.wait()
        sums = self.sum(table.from_wire(received))
        release(received, self.pair)
        return sums

    def sum(self, values: Tensor) -> Tensor:
        """The rows of both, the lower rank's first, added up."""
        if self.merge is not None:
            return self.merge.sum(values)
        lower, higher = values.chunk(2)
        return lower + higher


@dataclass(frozen=True, slots=True, eq=False)
class Route:
    """Which rows this rank sends in each round.

    Args:
        table: The table.
        axis: Whose ranks take part.
        rows: `[union]` the rows of the sum, ascending.
        fold: Of a rank beyond the largest power of two, and of the one that adds its rows to its own.
        rounds: The rounds of doubling, empty on a rank that is folded into another.
    """

    table: Table
    axis: Axis
    rows: Tensor
    fold: Round | None
    rounds: Sequence[Round]

    def all_reduce(self, values: Tensor) -> Deferred[Tensor]:
        """`[rows, width]` of this rank to `[union, width]`, bitwise the same on all ranks. Every rank must call it."""
        table, fold = self.table, self.fold
        if fold is None:
            # Ranks must begin their exchanges in one order: where some fold first, nobody doubles before the wait.
            is_folding = self.axis.size != doubled_ranks(self.axis.size)
            return Deferred(lambda: self._double(values).wait()) if is_folding else self._double(values)
        is_folded = fold.pair.rank == 1
        folded = fold.start(values if is_folded else values[:0], table)

        def finish() -> Tensor:
            theirs = table.from_wire(folded.wait())
            sums = values[:0] if is_folded else self._double(fold.sum(torch.cat([values, theirs]))).wait()
            lengths = len(self.rows), 0
            return table.from_wire(all_gather_parts(table.to_wire(sums), lengths, fold.pair, label=table.label).wait())

        return Deferred(finish)

    def _double(self, values: Tensor) -> Deferred[Tensor]:
        table = self.table
        if not self.rounds:
            return Deferred(values.clone)
        first, *others = self.rounds
        under_way = first.start(values, table)

        def finish() -> Tensor:
            sums = first.take(under_way, table)
            for following in others:
                sums = following.take(following.start(sums, table), table)
            if self.axis.size == doubled_ranks(self.axis.size):
                return sums
            return table.from_wire(table.to_wire(sums))  # as those get it who are sent it

        return Deferred(finish)


def route(indices: Tensor, table: Table, counts: Sequence[int], axis: Axis) -> Deferred[Route]:
    """Tell every rank which rows this one has; arguments as for `tulle.sync.allgather.route`."""
    gathered = gather_numbers(indices, counts, table.num_rows, table, axis)
    return Deferred(lambda: _rounds(gathered.wait(), table, axis))


def doubled_ranks(ranks: int) -> int:
    """The largest power of two that is no more than `ranks`: so many take part in the doubling."""
    return 1 << (ranks.bit_length() - 1)


def cost(characteristics: Characteristics, network: Network, ranks: int) -> Cost:
    """Row numbers, then `sum of d^(2^i) M` over the rounds, each as slow as its fullest message."""
    looks = characteristics.at(ranks)
    rounds, summed_rows, merged_rows = looks.spread.once(_rows_sent, ranks)
    rounds_bytes = rounds * looks.values_bytes
    numbers = told_bytes(looks)
    sent_bytes = rounds_bytes.sum(0) + numbers
    payer = int(sent_bytes.argmax())
    messages = int((rounds[:, payer] > 0).sum()) + (ranks - 1) * int(numbers[payer] > 0)
    fullest_bytes = rounds_bytes.max(1).values  # what one partner sends the other receives
    seconds = (
        int((fullest_bytes > 0).sum()) * (network.pair_latency_s or network.latency_s)
        + fullest_bytes.sum().item() / network.bandwidth_bytes_per_s
        + numbers_cost(looks, network).seconds
        + work_cost(
            network,
            summed_bytes=summed_rows * looks.values_bytes,
            copied_bytes=merged_rows * looks.values_bytes,
            numbers=sum(looks.rows_per_rank) + summed_rows,
        ).seconds
    )
    return Cost(round(sent_bytes[payer].item()), messages, seconds)


def _rows_sent(spread: Presence, ranks: int) -> tuple[Tensor, float, float]:
    """`[rounds, ranks]` rows that each rank sends in each round, fold and return included; rows added up, and got."""
    doubled = doubled_ranks(ranks)
    folded = ranks - doubled
    fold = spread.counts()
    summed_rows = float((fold[:folded] + fold[doubled:]).max()) if folded else 0.0
    merged_rows = 0.0
    fold[:doubled] = 0
    groups = spread.held[:doubled].clone()
    groups[:folded] |= spread.held[doubled:]
    rounds = [fold]
    while len(groups) > 1:
        rows = groups.sum(1).double() / spread.share
        sent = torch.zeros(ranks, dtype=torch.float64)
        sent[:doubled] = rows.repeat_interleave(doubled // len(groups))
        rounds.append(sent)
        summed_rows += float((rows[0::2] + rows[1::2]).max())
        groups = groups[0::2] | groups[1::2]
        merged_rows += float(groups.sum(1).max()) / spread.share
    returned = torch.zeros(ranks, dtype=torch.float64)
    returned[:folded] = groups.sum().double() / spread.share
    return torch.stack([*rounds, returned]), summed_rows, merged_rows


def _rounds(held: Sequence[Tensor], table: Table, axis: Axis) -> Route:
    """Plan the rounds of this rank from the rows that each rank holds."""
    doubled = doubled_ranks(axis.size)
    place = axis.rank % doubled
    fold = None
    if place + doubled < axis.size:
        fold = _round(held[place], held[place + doubled], axis, (place, place + doubled))
        fold = Round(fold.pair, (0, fold.lengths[1]), fold.merge)
    rounds: list[Round] = []
    if axis.rank == place:
        for bit in range(doubled.bit_length() - 1):
            pair = sorted([place, place ^ (1 << bit)])
            lower, higher = (_union(held, doubled, rank >> bit, bit) for rank in pair)
            rounds.append(_round(lower, higher, axis, (pair[0], pair[1])))
    return Route(table, axis, torch.unique(torch.cat(list(held))), fold, rounds)


def _union(held: Sequence[Tensor], doubled: int, group: int, bit: int) -> Tensor:
    """The rows of all ranks, with those folded into them, that have been added up before round `bit`."""
    members = [rows for rank, rows in enumerate(held) if (rank % doubled) >> bit == group]
    return members[0] if len(members) == 1 else torch.unique(torch.cat(members))


def _round(lower: Tensor, higher: Tensor, axis: Axis, pair: tuple[int, int]) -> Round:
    merge = None if torch.equal(lower, higher) else Merge.of(torch.cat([lower, higher]))
    # The two as an axis of their own, in the same process group: messages need no other.
    both = Axis(
        name=f"{axis.name}, of it ranks {pair[0]} and {pair[1]}",
        rank=int(axis.rank == pair[1]),
        size=2,
        ranks=(axis.ranks[pair[0]], axis.ranks[pair[1]]),
        group=axis.group,
        device=axis.device,
        timeout_s=axis.timeout_s,
        kept=axis.kept.setdefault(Round, {}),  # the pairs': its ranks on hosts are not theirs
    )
    return Round(both, (len(lower), len(higher)), merge)
