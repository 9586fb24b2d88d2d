"""Three exchanges of a set of tables, each one message a rank: row numbers, their values, and their gradients.

All are blocking; a courier does them beside forward and backward. Every rank of the axis must call each, alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import tulle.tables.columns as columns
import tulle.tables.rows as rows
from tulle.comm import all_to_all_parts
from tulle.mesh import Axis
from tulle.tables.blocks import exchange_blocks
from tulle.tables.split import ColumnSplit, Split

Wish = rows.Wish | columns.Wish
Route = rows.RowRoute | columns.ColumnRoute


@dataclass(frozen=True, slots=True, eq=False)
class Pushed:
    """The sum of all ranks' gradients for the rows that this rank owns.

    Args:
        places: `[rows]` places in this rank's part, ascending.
        values: `[rows, width]`, or this rank's columns of them.
        lookups: `[rows]` how often all ranks looked each up, if that was asked for.
    """

    places: Tensor
    values: Tensor
    lookups: Tensor | None


def wish(ids: Tensor, split: Split) -> Wish:
    """The distinct rows among ids, as the placement has them travel."""
    return columns.Wish.of(ids, split) if isinstance(split, ColumnSplit) else rows.Wish.of(ids, split)


def tell(wishes: Sequence[Wish], axis: Axis) -> list[Route]:
    """Tell the owners which rows are wanted, and hear which the others want here: counts, then numbers."""
    names = [one.split.name for one in wishes]
    counts = torch.tensor([[len(one.told[rank]) for one in wishes] for rank in range(axis.size)], device=axis.device)
    heard = all_to_all_parts([*counts], [len(wishes)] * axis.size, axis, label=", ".join(names)).wait()
    lengths = heard.view(axis.size, len(wishes)).T.tolist()
    numbers = [[part.to(axis.device).view(-1, 1) for part in one.told] for one in wishes]
    shapes = [[(length, 1) for length in of_table] for of_table in lengths]
    came = exchange_blocks(numbers, shapes, axis, names=names).wait()
    return [one.heard([block.view(-1) for block in blocks.by_rank]) for one, blocks in zip(wishes, came, strict=True)]


def fetch(routes: Sequence[Route], served: Sequence[Sequence[Tensor]], axis: Axis) -> list[Tensor]:
    """Give the values that others want, get those that this rank wants.

    Args:
        routes: One a table.
        served: What each route's `serve` gave.
        axis: Whose ranks take part.

    Returns:
        `[rows, width]` a table, in the order in which its rows travel.
    """
    names = [route.split.name for route in routes]
    came = exchange_blocks(served, [route.fetched_shapes() for route in routes], axis, names=names).wait()
    return [route.assemble(blocks) for route, blocks in zip(routes, came, strict=True)]


def push(
    routes: Sequence[Route], gradients: Sequence[Tensor], lookups: Sequence[Tensor | None], axis: Axis
) -> list[Pushed]:
    """Give each owner the gradients of its rows, and add up those that come.

    Args:
        routes: One a table.
        gradients: `[rows, width]` a table, in the order in which its rows travel.
        lookups: `[rows]` how often this rank looked each row up, for tables of which the owner must know.
        axis: Whose ranks take part.
    """
    names = [route.split.name for route in routes]
    counted = [t for t, counts in enumerate(lookups) if counts is not None]
    counts_under_way = exchange_blocks(
        [_for_owners(routes[t], lookups[t]) for t in counted],
        [[(count, 1) for count in routes[t].served] for t in counted],
        axis,
        names=[names[t] for t in counted],
    )
    values_under_way = exchange_blocks(
        [route.push(gradient) for route, gradient in zip(routes, gradients, strict=True)],
        [route.pushed_shapes() for route in routes],
        axis,
        names=names,
    )
    merges = [route.merge() for route in routes]
    heard = dict(zip(counted, counts_under_way.wait(), strict=True))
    pushed: list[Pushed] = []
    for t, blocks in enumerate(values_under_way.wait()):
        merge = merges[t]
        total = None
        if t in heard:
            every = heard[t].stacked().view(-1)
            total = torch.zeros_like(merge.rows, dtype=every.dtype).index_add_(0, merge.run(), every[merge.order])
        pushed.append(Pushed(merge.rows, merge.sum(routes[t].collect(blocks)), total))
    return pushed


def _for_owners(route: Route, counts: Tensor | None) -> list[Tensor]:
    assert counts is not None, "only tables with counts are asked for"
    if isinstance(route, columns.ColumnRoute):
        return [counts.view(-1, 1)] * route.split.axis.size
    return [part.view(-1, 1) for part in counts.split(route.wanted)]
