"""Three exchanges of a set of bundles, each one message a rank: row numbers, their values, and their gradients.

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
from tulle.tables.bundle import Route, Wish
from tulle.tables.split import ColumnSplit, RowSplit, Split


@dataclass(frozen=True, slots=True, eq=False)
class Pushed:
    """The sum of all ranks' gradients for the rows of one table that this rank owns.

    Args:
        places: `[rows]` places in this rank's part, ascending.
        values: `[rows, width]`, or this rank's columns of them.
        lookups: `[rows]` how often all ranks looked each up, if that was asked for.
    """

    places: Tensor
    values: Tensor
    lookups: Tensor | None


def bundles(splits: Sequence[tuple[Split, torch.dtype]]) -> list[list[int]]:
    """Which tables travel as one, by their numbers in the sequence: those of one placement, width and dtype."""
    found: dict[object, list[int]] = {}
    for number, (split, dtype) in enumerate(splits):
        found.setdefault((type(split), split.width, dtype), []).append(number)
    return [*found.values()]


def wish(ids: Sequence[Tensor], splits: Sequence[Split]) -> Wish:
    """What lookups in the tables of one bundle want.

    Args:
        ids: Of each table, in any shape.
        splits: The tables.

    Raises:
        IndexError: If a table has no such row.
    """
    by_columns = [split for split in splits if isinstance(split, ColumnSplit)]
    if by_columns:
        return columns.wish(ids, by_columns)
    return rows.wish(ids, [split for split in splits if isinstance(split, RowSplit)])


def tell(wishes: Sequence[Wish], axis: Axis) -> list[Route]:
    """Tell the owners which rows are wanted, and hear which the others want here: counts, then numbers."""
    names = [[split.name for split in one.splits] for one in wishes]
    label = dict.fromkeys((name for tables in names for name in tables), 1)
    tables = [len(one.splits) for one in wishes]
    counts = [[count for one in wishes for count in one.counts[rank]] for rank in range(axis.size)]
    parts = [*torch.tensor(counts, device=axis.device)]
    came = all_to_all_parts(parts, [sum(tables)] * axis.size, axis, label=label).wait().view(axis.size, -1)
    served = [part.tolist() for part in came.split(tables, dim=1)]
    numbers = [[part.to(axis.device).view(-1, 1) for part in one.told] for one in wishes]
    shapes = [[(sum(of_rank), 1) for of_rank in of_bundle] for of_bundle in served]
    heard = exchange_blocks(numbers, shapes, axis, names=names).wait()
    return [
        (columns.ColumnRoute if isinstance(one.splits[0], ColumnSplit) else rows.RowRoute)(
            one.splits, len(one), one.counts, of_bundle, blocks.stacked().view(-1)
        )
        for one, of_bundle, blocks in zip(wishes, served, heard, strict=True)
    ]


def fetch(routes: Sequence[Route], served: Sequence[Sequence[Tensor]], axis: Axis) -> list[Tensor]:
    """Give the values that others want, get those that this rank wants.

    Args:
        routes: One a bundle.
        served: What each route's `serve` gave.
        axis: Whose ranks take part.

    Returns:
        `[rows, width]` a bundle, in the order in which its rows travel.
    """
    names = [route.names for route in routes]
    came = exchange_blocks(served, [route.fetched_shapes() for route in routes], axis, names=names).wait()
    return [route.assemble(blocks) for route, blocks in zip(routes, came, strict=True)]


def push(
    routes: Sequence[Route], gradients: Sequence[Tensor], lookups: Sequence[Tensor | None], axis: Axis
) -> list[list[Pushed]]:
    """Give each owner the gradients of its rows, and add up those that come.

    Args:
        routes: One a bundle.
        gradients: `[rows, width]` a bundle, in the order in which its rows travel.
        lookups: `[rows]` int32, how often this rank looked each row up, for bundles of which the owner must know.
        axis: Whose ranks take part.

    Returns:
        By bundle and table.
    """
    names = [route.names for route in routes]
    counted = [(b, counts.view(-1, 1)) for b, counts in enumerate(lookups) if counts is not None]
    counts_under_way = exchange_blocks(
        [routes[b].push_counts(counts) for b, counts in counted],
        [[(length, 1) for length, _ in routes[b].pushed_shapes()] for b, _ in counted],
        axis,
        names=[names[b] for b, _ in counted],
    )
    values_under_way = exchange_blocks(
        [route.push(gradient) for route, gradient in zip(routes, gradients, strict=True)],
        [route.pushed_shapes() for route in routes],
        axis,
        names=names,
    )
    sums = [route.sums() for route in routes]
    heard = dict(zip([b for b, _ in counted], counts_under_way.wait(), strict=True))
    pushed: list[list[Pushed]] = []
    for b, blocks in enumerate(values_under_way.wait()):
        one = sums[b]
        values = one.by_table(one.merge.sum(blocks.stacked()))
        totals: Sequence[Tensor | None] = [None] * len(values)
        if b in heard:
            every = heard[b].stacked().view(-1)[one.merge.order]
            totals = one.by_table(every.new_zeros(len(one.merge.rows)).index_add_(0, one.merge.run(), every))
        pushed.append([Pushed(*parts) for parts in zip(one.places(), values, totals, strict=True)])
    return pushed
