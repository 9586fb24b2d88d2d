"""Three exchanges of a set of bundles, each one message a rank: row numbers, their values, and their gradients.

All are blocking; a background thread does them beside forward and backward. Every rank of the axis must call each,
alike.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import tulle.tables.columns as columns
import tulle.tables.rows as rows
from tulle.comm import all_to_all_parts, pause, traffic, used_here
from tulle.errors import CommunicationError, DataError, ModelError
from tulle.mesh import Axis
from tulle.tables.blocks import exchange_blocks
from tulle.tables.bundle import Request, Route, rows_by_table
from tulle.tables.distinct import Ids
from tulle.tables.split import ColumnSplit, RowSplit, Split

_REFUSED = -1
"""A count of rows of a rank whose ids are no rows."""
_OVER = -2
"""A count of rows of a rank that has no further batch."""
_BEHIND = -3
"""A count of rows of a rank that goes on to the gradients of its lookups."""
_UNLIKE = -4
"""A count of rows of a rank whose next batch lacks what its lookups were found in until now."""
_ALIKE = "whether all look up alike"
_MEND = (
    ": all ranks must look up in the same split tables, in one order; one that has no ids for a table looks up none "
    "(`ids[mask]` may be empty). Or keep the tables whole (another scheme than 'rows' or 'columns' in the plan)"
)
_COUNT_BITS = 40
"""Of a number that is told: a count is in the lower ones, and which table it is of in those above."""


@dataclass(frozen=True, slots=True, eq=False)
class Pushed:
    """The sum of all ranks' gradients for the rows of one table that this rank owns.

    Args:
        places: `[rows]` places in this rank's part, ascending.
        values: `[rows, width]`, or this rank's columns of them; in float32 if they are sums of half-precision values.
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


def request_of(ids: Sequence[Ids], splits: Sequence[Split]) -> Request:
    """What lookups in the tables of one bundle want.

    Args:
        ids: Of each table.
        splits: The tables.

    Raises:
        IndexError: If a table has no such row.
        TypeError: If ids are no whole numbers.
    """
    by_columns = [split for split in splits if isinstance(split, ColumnSplit)]
    if by_columns:
        return columns.request_of(ids, by_columns)
    return rows.request_of(ids, [split for split in splits if isinstance(split, RowSplit)])


def tell(requests: Sequence[Request], axis: Axis) -> list[Route]:
    """Tell the owners which rows are wanted, and hear which the others want here: counts, then numbers.

    Raises:
        CommunicationError: If another rank had to `refuse`.
        ModelError: If another rank looked up in other tables.
    """
    rows_told = [rows_by_table(one.splits, one.counts) for one in requests]
    label = dict.fromkeys((name for of_tables in rows_told for name in of_tables), 1)
    tables = [len(one.splits) for one in requests]
    lengths = [length for one in requests for length in one.distinct.lengths()]
    counts = [[count for one in requests for count in one.counts[rank]] + lengths for rank in range(axis.size)]
    marks = torch.tensor([_mark(split) for one in requests for split in one.splits] * 2)
    came = _exchange_counts([*(torch.tensor(counts) | marks).to(axis.device, non_blocking=True)], axis, label)
    told = _counts_in(came, marks, axis, label)
    served, wanted = (heard.split(tables, dim=1) for heard in told.chunk(2, dim=1))
    most_rows = [int(by_rank.sum(1).max()) for by_rank in wanted]
    numbers = [[part.to(axis.device).view(-1, 1) for part in one.told] for one in requests]
    shapes = [[(count, 1) for count in of_bundle.sum(1).tolist()] for of_bundle in served]
    number_bytes = [most * parts[0].itemsize for most, parts in zip(most_rows, numbers, strict=True)]
    heard = exchange_blocks(numbers, shapes, axis, rows=rows_told, most_bytes=number_bytes).wait()
    return [
        (columns.ColumnRoute if isinstance(one.splits[0], ColumnSplit) else rows.RowRoute)(
            one.splits, len(one), one.counts, of_bundle.tolist(), blocks.stacked().view(-1), most
        )
        for one, of_bundle, blocks, most in zip(requests, served, heard, most_rows, strict=True)
    ]


def refuse(tables: Sequence[str], axis: Axis) -> None:
    """What a rank does in place of `tell` if its ids are no rows of the tables, so that the others need not wait."""
    _say_instead(_REFUSED, dict.fromkeys(tables, 1), len(tables), axis)


def tell_the_end(tables: Sequence[str], axis: Axis) -> None:
    """What a rank does in place of `tell` if it has no further batch.

    Raises:
        DataError: If another rank has one.
    """
    came = _say_instead(_OVER, dict.fromkeys(tables, 1), len(tables), axis)
    for rank in came.ne(_OVER).any(1).nonzero().flatten().tolist():
        raise uneven(axis.rank, rank, axis)


def tell_unlike(tables: Sequence[str], axis: Axis) -> None:
    """What a rank does in place of `tell` if its next batch lacks what lookups were found in until now.

    Raises:
        DataError: If another rank's has it, or it has none.
    """
    came = _say_instead(_UNLIKE, dict.fromkeys(tables, 1), len(tables), axis)
    for rank in came.ne(_UNLIKE).any(1).nonzero().flatten().tolist():
        raise uneven(rank, axis.rank, axis) if _OVER in came[rank].tolist() else _unlike(axis.rank, rank, axis)


def tell_of_gradients(axis: Axis) -> None:
    """What a rank does before it pushes gradients, now and then: one that still looks up in a table is told.

    Raises:
        ModelError: If there is one.
    """
    came = _say_instead(_BEHIND, _ALIKE, 1, axis)
    for rank in came.ne(_BEHIND).any(1).nonzero().flatten().tolist():
        raise ModelError(
            f"rank {axis.rank} of axis {axis.name!r} left out a lookup that rank {rank} makes in step "
            f"{traffic.step}{_MEND}"
        )


def _say_instead(word: int, label: str | Mapping[str, int], tables: int, axis: Axis) -> Tensor:
    """Tell all ranks a word in place of each count; gives what they say."""
    counts = torch.full((2 * tables,), word, device=axis.device)
    return _exchange_counts([counts] * axis.size, axis, label)


def uneven(first: int, other: int, axis: Axis) -> DataError:
    """What is raised where one rank has no further batch, and another has."""
    return DataError(
        f"rank {first} of axis {axis.name!r} has no batch after the one of step {traffic.step + 1}, rank {other} has: "
        "give all ranks as many, with drop_last=True or a DistributedSampler say; one with nothing in it will do"
    )


def _unlike(first: int, other: int, axis: Axis) -> DataError:
    return DataError(
        f"the batch of rank {first} of axis {axis.name!r} after the one of step {traffic.step + 1} lacks an entry in "
        "which its lookups were found until now, or ids= gives those of other tables than until now; not so that of "
        f"rank {other}: give all ranks batches of one form, with an empty tensor where one has nothing to look up"
    )


def _exchange_counts(parts: Sequence[Tensor], axis: Axis, label: str | Mapping[str, int]) -> Tensor:
    """`[ranks, 2 tables]`, on the CPU: of each rank what it wants here of each table, and what of that anywhere."""
    lengths = [len(parts[0])] * axis.size
    most_bytes = axis.size * parts[0].nbytes
    came = all_to_all_parts(parts, lengths, axis, label=label, most_bytes=most_bytes).wait()
    pause()
    return came.view(axis.size, -1).cpu()  # the host reads it more than once: a GPU is waited for once


def _mark(split: Split) -> int:
    """By which a table is known in what is told, above the bits of a count."""
    return zlib.crc32(split.name.encode()) % (1 << (62 - _COUNT_BITS)) << _COUNT_BITS


def _counts_in(came: Tensor, marks: Tensor, axis: Axis, tables: Iterable[str]) -> Tensor:
    """What all ranks have told, without the marks of the tables, if all are these."""
    counts = came ^ marks
    is_other = (counts >> _COUNT_BITS).ne(0)  # as of a word, below zero, that is told in place of a count
    for rank in is_other.any(1).nonzero().flatten().tolist():
        told = came[rank].tolist()
        if _OVER in told:
            raise uneven(rank, axis.rank, axis)
        if _UNLIKE in told:
            raise _unlike(rank, axis.rank, axis)
        if _REFUSED in told:
            raise CommunicationError(
                f"rank {rank} of axis {axis.name!r} looked up, in step {traffic.step}, what is no row of "
                f"{', '.join(tables)}: its own error says what"
            )
        raise ModelError(
            f"rank {axis.rank} of axis {axis.name!r} looked up in {', '.join(tables)} in step {traffic.step}, and "
            f"rank {rank} did not{_MEND}"
        )
    return counts


def fetch(routes: Sequence[Route], served: Sequence[Sequence[Tensor]], axis: Axis) -> list[Tensor]:
    """Give the values that others want, get those that this rank wants.

    Args:
        routes: One a bundle.
        served: What each route's `serve` gave.
        axis: Whose ranks take part.

    Returns:
        `[rows, width]` a bundle, in the order in which its rows travel.
    """
    used_here(*(part for parts in served for part in parts))
    rows_served = [route.rows_served() for route in routes]
    shapes = [route.fetched_shapes() for route in routes]
    most_bytes = [route.values_bytes(parts[0].dtype) for route, parts in zip(routes, served, strict=True)]
    came = exchange_blocks(served, shapes, axis, rows=rows_served, most_bytes=most_bytes).wait()
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
    used_here(*gradients, *(route.places for route in routes), *(one for one in lookups if one is not None))
    rows_pushed = [route.rows_pushed() for route in routes]
    counted = [(b, counts.view(-1, 1)) for b, counts in enumerate(lookups) if counts is not None]
    counts_under_way = exchange_blocks(
        [routes[b].push_counts(counts) for b, counts in counted],
        [[(length, 1) for length, _ in routes[b].pushed_shapes()] for b, _ in counted],
        axis,
        rows=[rows_pushed[b] for b, _ in counted],
        most_bytes=[routes[b].most_rows * counts.itemsize for b, counts in counted],
    )
    values_under_way = exchange_blocks(
        [route.push(gradient) for route, gradient in zip(routes, gradients, strict=True)],
        [route.pushed_shapes() for route in routes],
        axis,
        rows=rows_pushed,
        most_bytes=[route.values_bytes(one.dtype) for route, one in zip(routes, gradients, strict=True)],
    )
    sums = [route.sums() for route in routes]
    heard = dict(zip([b for b, _ in counted], counts_under_way.wait(), strict=True))
    pushed: list[list[Pushed]] = []
    for b, blocks in enumerate(values_under_way.wait()):
        one = sums[b]
        values = one.by_table(one.merge.wide_sum(blocks.stacked()))
        totals: Sequence[Tensor | None] = [None] * len(values)
        if b in heard:
            every = heard[b].stacked().view(-1)[one.merge.order]
            totals = one.by_table(every.new_zeros(len(one.merge.rows)).index_add_(0, one.merge.run(), every))
        pushed.append([Pushed(*parts) for parts in zip(one.places(), values, totals, strict=True)])
    return pushed
