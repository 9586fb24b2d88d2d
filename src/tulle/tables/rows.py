"""Tables split by rows: a rank fetches each distinct row that it looks up from its owner, and pushes its gradient back.

    forward    distinct rows, by owner --numbers--> owner --values--> looked up here
    backward   gradients of the same rows --values--> owner: sum over ranks, optimizer

Per rank and step that is twice its distinct rows, whatever the number of ranks.

Source: DESIGN idea 3; EmbRace (ICPP'22) for the all-to-all in place of an all-gather; Zen (OSDI'25, section 3.2) for
owners that do not depend on the data.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tulle.cost import NOTHING, Characteristics, Cost, Network, exchange_cost, work_cost
from tulle.partition import Hashed
from tulle.rows import Merge
from tulle.tables.blocks import Blocks, Shape
from tulle.tables.split import RowSplit

_COUNT_BYTES = 8


@dataclass(frozen=True, slots=True, eq=False)
class Wish:
    """The distinct rows that this rank looks up in a table in one go, by owner.

    Args:
        split: The table.
        rows: `[rows]` distinct, ascending.
        positions: `[rows]` where each lies in the order in which they travel: by owner.
        told: Numbers that each owner is told: places at it.
    """

    split: RowSplit
    rows: Tensor
    positions: Tensor
    told: tuple[Tensor, ...]

    @staticmethod
    def of(ids: Tensor, split: RowSplit) -> Wish:
        """From the ids of lookups, in any shape."""
        rows = torch.unique(ids)
        owner, place = split.partition.place(rows)
        order = torch.argsort(owner, stable=True)
        positions = torch.empty_like(order)
        positions[order] = torch.arange(len(order), device=order.device)
        counts = torch.bincount(owner, minlength=split.axis.size).tolist()
        return Wish(split, rows, positions, place[order].int().split(counts))

    def heard(self, asked: list[Tensor]) -> RowRoute:
        """With the numbers that each rank has told this one."""
        return RowRoute(self.split, [len(part) for part in self.told], [len(part) for part in asked], torch.cat(asked))


@dataclass(frozen=True, slots=True, eq=False)
class RowRoute:
    """How the rows of one wish travel, forward and backward.

    Args:
        split: The table.
        wanted: Rows that this rank wants of each owner.
        served: Rows that each rank wants of this one.
        places: `[sum(served)]` which those are, by rank.
    """

    split: RowSplit
    wanted: list[int]
    served: list[int]
    places: Tensor

    def merge(self) -> Merge:
        """How the gradients of several ranks for a row add up here."""
        return Merge.of(self.places.long())

    def serve(self, shard: Tensor) -> tuple[Tensor, ...]:
        """Values for each rank, from this rank's part of the table."""
        return shard.detach().index_select(0, self.places.to(shard.device)).split(self.served)

    def fetched_shapes(self) -> list[Shape]:
        """Of the blocks that come in return."""
        return [(rows, self.split.width) for rows in self.wanted]

    def assemble(self, blocks: Blocks) -> Tensor:
        """`[rows, width]` of this rank's wish, in the order in which rows travel."""
        return blocks.stacked()

    def push(self, gradient: Tensor) -> tuple[Tensor, ...]:
        """Parts of `[rows, width]` gradients for each owner."""
        return gradient.split(self.wanted)

    def pushed_shapes(self) -> list[Shape]:
        """Of the blocks that come."""
        return [(rows, self.split.width) for rows in self.served]

    def collect(self, blocks: Blocks) -> Tensor:
        """`[sum(served), width]` gradients, in the order of `places`."""
        return blocks.stacked()


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
    own = by_owner.diagonal()
    wanted, served = by_owner.sum(1) - own, by_owner.sum(0) - own
    values_rows = wanted + served
    sent_bytes = values_rows * looks.values_bytes + wanted * looks.index_bytes + _COUNT_BYTES * (ranks - 1)
    payer = int(sent_bytes.argmax())
    asked = by_owner - torch.diag(own)
    messages = (ranks - 1) + 2 * int((asked[payer] > 0).sum()) + int((asked[:, payer] > 0).sum())
    # Each way the fuller of what the busiest rank sends and receives; counts and numbers come before the first.
    busiest_rows = torch.maximum(wanted, served).max().item()
    told = exchange_cost(busiest_rows * looks.index_bytes, 0, network, rounds=2)
    values = exchange_cost(2 * busiest_rows * looks.values_bytes, 0, network, rounds=2)
    work = work_cost(
        network,
        summed_bytes=by_owner.sum(0).max().item() * looks.values_bytes,
        copied_bytes=by_owner.sum(0).max().item() * looks.values_bytes,
        numbers=2 * max(looks.rows_per_rank) + by_owner.sum(0).max().item(),
    )
    return Cost(round(sent_bytes[payer].item()), messages, told.seconds + values.seconds + work.seconds)
