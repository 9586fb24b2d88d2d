"""Scheme `block`: the table in blocks of 256 values or more; those that hold anything go whole to owners and back.

OmniReduce (SIGCOMM'21, section 3), with the ranks themselves as aggregators: blocks are consecutive rows, and owners
have consecutive blocks. It needs few numbers for many rows, and suits rows that lie close together; of scattered ones
it sends mostly zeros.

    block      0                 1                 2                 3
    rank 0     . 3 . 1           . . . .           2 . . .           . . . .      sends blocks 0 and 2, whole
    rank 1     . . . .           . . . .           . . 4 1           . . . .      sends block 2, whole

    route         row numbers of each rank -> every rank: blocks, owners and sizes follow
    all_reduce    blocks -> their owners, who sum them; sums of blocks -> every rank, which picks the touched rows

A touched row whose values sum to zero looks like an untouched one within its block, so somebody must tell them apart.
A column of marks beside the values would travel twice and add a `width`-th to every block, zeros included: for narrow
rows as much as the values. The row numbers cost four bytes a row or one bit, whichever is less, to each other rank; and
as they tell every rank what every other has, the four steps in which `tulle.sync.push_pull` settles its sizes and
numbers are saved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

import tulle.sync.push_pull as push_pull
from tulle.comm import Deferred
from tulle.cost import Characteristics, Cost, Network, all_gather_cost, exchange_cost, work_cost
from tulle.mesh import Axis
from tulle.partition import Contiguous
from tulle.sync.numbers import gather_numbers, numbers_cost, told_bytes
from tulle.sync.table import Table

BLOCK_VALUES = 256
"""Values that a block has at least: OmniReduce's block size."""


@dataclass(frozen=True, slots=True, eq=False)
class Route:
    """Which blocks this rank sends, and where rows lie in them.

    Args:
        table: The table.
        blocks: The way of the blocks, each as one row of `block_rows x width` values.
        rows: `[union]` the rows of the sum, ascending.
        sent_places: `[rows]` where this rank's rows lie in the blocks that it sends, laid end to end.
        sum_places: `[union]` where the rows of the sum lie in the blocks of the sum.
    """

    table: Table
    blocks: push_pull.Route
    rows: Tensor
    sent_places: Tensor
    sum_places: Tensor

    def all_reduce(self, values: Tensor) -> Deferred[Tensor]:
        """`[rows, width]` of this rank to `[union, width]`, bitwise the same on all ranks. Every rank must call it."""
        width, block_width, blocks = self.table.width, self.blocks.table.width, sum(self.blocks.leaving)
        block_rows = rows_in_block(width)
        sent = values.new_zeros(blocks * block_rows, width)
        sent.index_copy_(0, self.sent_places, values)
        summed = self.blocks.all_reduce(sent.view(blocks, block_width))

        def finish() -> Tensor:
            sums = summed.wait()
            return sums.view(len(sums) * block_rows, width).index_select(0, self.sum_places)

        return Deferred(finish)


def rows_in_block(width: int) -> int:
    """Rows of one block; of a table without columns as of one that has one."""
    return -(-BLOCK_VALUES // max(1, width))


def route(indices: Tensor, table: Table, counts: Sequence[int], axis: Axis) -> Deferred[Route]:
    """Tell every rank which rows this one has; arguments as for `tulle.sync.allgather.route`."""
    gathered = gather_numbers(indices, counts, table.num_rows, table, axis)

    def finish() -> Route:
        held = gathered.wait()
        block_rows = rows_in_block(table.width)
        blocks = [torch.unique_consecutive(rows // block_rows) for rows in held]
        rows = torch.unique(torch.cat(held))
        way = _way(blocks, block_rows, table, axis)
        sent_places = _places(indices, blocks[axis.rank], block_rows)
        return Route(table, way, rows, sent_places, _places(rows, way.rows, block_rows))

    return Deferred(finish)


def cost(characteristics: Characteristics, network: Network, ranks: int) -> Cost:
    """Row numbers; every held block to its owner; every owner's blocks to all: the fullest owner sets the pace."""
    looks = characteristics.at(ranks)
    block_rows = rows_in_block(looks.width)
    block_bytes = block_rows * looks.values_bytes
    by_owner, owned = looks.spread.in_blocks(block_rows).owned(_owners(looks.num_rows, block_rows, ranks))
    own, of_ranks, at_owners = by_owner.own(), by_owner.of_ranks(), by_owner.at_owners()
    leaving, coming = of_ranks - own, at_owners - own
    others = ranks - 1
    numbers = told_bytes(looks)
    sent_bytes = (leaving + others * owned) * block_bytes + numbers
    payer = int(sent_bytes.argmax())
    owners_reached = int(by_owner.reached()[payer]) - int(own[payer] > 0)
    messages = others * int(numbers[payer] > 0) + owners_reached + others * int(owned[payer] > 0)
    push_bytes = torch.maximum(leaving, coming).max().item() * block_bytes
    push = exchange_cost(push_bytes, 0, network, rounds=min(1, others))
    pull = all_gather_cost((owned * block_bytes).tolist(), network)
    held_blocks, union_blocks = of_ranks.max().item(), owned.sum().item()
    work = work_cost(
        network,
        summed_bytes=at_owners.max().item() * block_bytes,
        copied_bytes=2 * held_blocks * block_bytes + union_blocks * block_bytes,
    )
    seconds = numbers_cost(looks, network).seconds + push.seconds + pull.seconds + work.seconds
    return Cost(round(sent_bytes[payer].item()), messages, seconds)


def _owners(num_rows: int, block_rows: int, ranks: int) -> Contiguous:
    return Contiguous(-(-num_rows // block_rows), ranks)


def _way(blocks: Sequence[Tensor], block_rows: int, table: Table, axis: Axis) -> push_pull.Route:
    """Push and pull of blocks, whose sizes need not be told, because every rank knows what every other holds."""
    owners = _owners(table.num_rows, block_rows, axis.size)
    whole = replace(table, num_rows=owners.num_rows, width=block_rows * table.width)
    return push_pull.settle(blocks, whole, axis, lambda all_held: owners.place(all_held.rows)[0], is_ordered=True)


def _places(rows: Tensor, blocks: Tensor, block_rows: int) -> Tensor:
    """Where rows lie in these blocks laid end to end."""
    return torch.searchsorted(blocks, rows // block_rows) * block_rows + rows % block_rows
