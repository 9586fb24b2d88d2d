"""Tables split by rows: a rank fetches each distinct row that it looks up from its owner, and pushes its gradient back.

    forward    distinct rows, by owner --numbers--> owner --values--> looked up here
    backward   gradients of the same rows --values--> owner: sum over ranks, optimizer

Per rank and step that is twice its distinct rows, whatever the number of ranks.

Source: EmbRace (ICPP'22) for the all-to-all in place of an all-gather; Zen (OSDI'25, section 3.2) for owners that do
not depend on the data.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tulle.cost import NOTHING, Characteristics, Cost, Network, exchange_cost, work_cost
from tulle.partition import Hashed, order_by_owner
from tulle.rows import inverse, occurrences
from tulle.tables.blocks import Blocks, Shape
from tulle.tables.bundle import Counts, Request, Route, as_told, count_in
from tulle.tables.distinct import Distinct, Ids
from tulle.tables.split import RowSplit

_COUNT_BYTES = 8


def request_of(ids: Sequence[Ids], splits: Sequence[RowSplit]) -> Request:
    """What lookups of ids, by table, want of the owners."""
    distinct = Distinct.of(ids, splits)
    tables = distinct.tables()
    ranks = splits[0].axis.size
    owner, place = Hashed.place_in(distinct.numbers(tables), tables, [split.partition for split in splits])
    order = order_by_owner(owner)
    counts = occurrences(owner * len(splits) + tables, ranks * len(splits)).view(ranks, -1).tolist()
    told = as_told(place.index_select(0, order), max(split.partition.places for split in splits))
    return Request(splits, distinct, inverse(order), counts, told.split([sum(of_rank) for of_rank in counts]))


class RowRoute(Route):
    """Rows go whole, each between this rank and its owner."""

    __slots__ = ()

    def count(self, wanted: Tensor) -> Counts:
        """Each row is told its owner."""
        return count_in(wanted, self.wanted)

    def fetched_shapes(self) -> list[Shape]:
        """One block of rows from each owner."""
        return [(sum(of_rank), self.splits[0].width) for of_rank in self.wanted]

    def assemble(self, blocks: Blocks) -> Tensor:
        """Rows come in the order in which they travel."""
        return blocks.stacked()

    def push(self, gradient: Tensor) -> Sequence[Tensor]:
        """The rows of each owner."""
        return gradient.split([sum(of_rank) for of_rank in self.wanted])

    def push_counts(self, counts: Tensor) -> Sequence[Tensor]:
        """The rows of each owner."""
        return self.push(counts)


def cost(characteristics: Characteristics, network: Network, ranks: int) -> Cost:
    """Bytes of the rank that pays most, row numbers and counts included, and predicted seconds, of a step.

    Args:
        characteristics: What the gradient looks like.
        network: What the axis gives.
        ranks: Number of ranks.
    """
    looks = characteristics.at(ranks)
    if ranks == 1:
        return NOTHING
    by_owner, _ = looks.spread.owned(Hashed(looks.num_rows, ranks))
    own, at_owners = by_owner.own(), by_owner.at_owners()
    wanted, served = by_owner.of_ranks() - own, at_owners - own
    sent_bytes = (wanted + served) * looks.values_bytes + wanted * looks.index_bytes + _COUNT_BYTES * (ranks - 1)
    payer = int(sent_bytes.argmax())
    is_own = int(own[payer] > 0)
    asked, asking = (int(by_owner.reached(from_owners=way)[payer]) - is_own for way in (False, True))
    messages = (ranks - 1) + 2 * asked + asking
    # Each way the fuller of what the busiest rank sends and receives; counts and numbers come before the first.
    busiest_rows = torch.maximum(wanted, served).max().item()
    told = exchange_cost(busiest_rows * looks.index_bytes, 0, network, rounds=2)
    values = exchange_cost(2 * busiest_rows * looks.values_bytes, 0, network, rounds=2)
    work = work_cost(
        network,
        summed_bytes=at_owners.max().item() * looks.values_bytes,
        copied_bytes=at_owners.max().item() * looks.values_bytes,
        numbers=2 * max(looks.rows_per_rank) + at_owners.max().item(),
    )
    return Cost(round(sent_bytes[payer].item()), messages, told.seconds + values.seconds + work.seconds)
