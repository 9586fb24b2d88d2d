"""Sums the gradients of several tables in one go, whatever kind each rank has: rows, dense, or none.

    phase 1  announce   one small all-gather: how many rows each rank has of each table, or that it is dense or absent
    phase 2  route      row numbers: with them every size is known, on the CPU, before there is any value
    phase 3  sum        the values

Tables of one scheme, width and dtype travel as one: their rows are numbered through, so that 26 tables cost the
latencies of one. A table of which any rank has a dense gradient (tied to an output layer, say) is summed dense: the
rule of *Densifying Assumed-sparse Tensors*, section 3.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from tulle.comm import Deferred, all_gather, pause
from tulle.comm import all_reduce as reduce_dense
from tulle.mesh import Axis
from tulle.rows import RowSparse
from tulle.sync.protocol import Route
from tulle.sync.schemes import scheme_named
from tulle.sync.table import Table

Gradient = RowSparse | Tensor | None
"""Of one table on one rank: coalesced rows, a dense tensor, or nothing."""

DENSE = -1
"""Announced for a dense gradient."""
ABSENT = -2
"""Announced where there is no gradient."""
COUNTS = "row counts"
"""What an exchange is for in which ranks tell each other how many rows they have."""


def announce(gradients: Sequence[Gradient], axis: Axis) -> Deferred[list[list[int]]]:
    """Phase 1: tell every rank what this one has. Every rank of the axis must call it.

    Args:
        gradients: This rank's, one a table, coalesced.
        axis: Whose ranks take part.

    Returns:
        `counts[r][t]`: rows of table t on rank r, -1 if dense there, -2 if there is none.
    """
    return announce_counts([count(gradient) for gradient in gradients], axis)


def announce_counts(counts: Sequence[int], axis: Axis) -> Deferred[list[list[int]]]:
    """Phase 1, where the counts are known and the gradients are not yet there. Every rank of the axis must call it.

    Args:
        counts: One a table: what `count` would give of this rank's gradient.
        axis: Whose ranks take part.

    Returns:
        What `announce` gives.
    """
    mine = torch.tensor(counts, dtype=torch.int64)
    gathered = all_gather(mine.to(axis.device, non_blocking=True), axis, label=COUNTS)

    def finish() -> list[list[int]]:
        came = gathered.wait()
        pause()
        return came.tolist()

    return Deferred(finish)


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """Tables that travel as one: their numbers, and the way of their rows, numbered through."""

    members: Sequence[int]
    route: Deferred[Route]


@dataclass(frozen=True, slots=True, eq=False)
class Routes:
    """What phase 2 settled: which rows of which tables go where; `sum` takes the values. `route` makes it.

    Args:
        tables: The tables, the same on all ranks.
        dense: Numbers of those of which a rank has a dense gradient.
        groups: Those that travel by rows, by scheme, width and dtype; in none are those that no rank has a gradient of.
        axis: Whose ranks take part.
    """

    tables: Sequence[Table]
    dense: Sequence[int]
    groups: Sequence[Group]
    axis: Axis

    def wait(self) -> Routes:
        """Return when the row numbers have been told. Every rank of the axis must call it, or `sum`."""
        for group in self.groups:
            group.route.wait()
        return self

    def sum(self, gradients: Sequence[Gradient]) -> Deferred[list[Gradient]]:
        """Phase 3: sum each table's gradient over the axis. Every rank of the axis must call it.

        Args:
            gradients: This rank's, one a table, with the rows that the routes were made for.

        Returns:
            The sums: coalesced rows, a dense tensor where any rank's was dense, None where no rank had any.
        """
        reduced = [
            (t, reduce_dense(_as_dense(gradients[t], self.tables[t]), self.axis, label=self.tables[t].name))
            for t in self.dense
        ]
        summed = [
            (
                group,
                group.route.wait().all_reduce(
                    _end_to_end([_values(gradients[t], self.tables[t]) for t in group.members])
                ),
            )
            for group in self.groups
        ]

        def finish() -> list[Gradient]:
            sums: list[Gradient] = [None] * len(self.tables)
            for t, pending in reduced:
                sums[t] = pending.wait()
            for group, pending in summed:
                members = [self.tables[t] for t in group.members]
                parts = split_rows(group.route.wait().rows, pending.wait(), members)
                for t, rows in zip(group.members, parts, strict=True):
                    sums[t] = rows
            return sums

        return Deferred(finish)


def route(
    indices: Sequence[Tensor | None],
    tables: Sequence[Table],
    counts: Sequence[Sequence[int]],
    schemes: Sequence[str],
    axis: Axis,
) -> Routes:
    """Phase 2: tell whom it concerns which rows this rank has. Every rank of the axis must call it.

    Args:
        indices: This rank's row numbers, one tensor a table, ascending and distinct; None where it has no rows.
        tables: The tables, the same on all ranks.
        counts: What `announce` gave.
        schemes: Name of each table's scheme, the same on all ranks.
        axis: Whose ranks take part.

    Returns:
        By which the values can go as soon as they are there; row numbers are under way.

    Raises:
        PlanError: If there is no scheme of a name.
    """
    dense: list[int] = []
    by_kind: dict[object, list[int]] = {}
    for t, table in enumerate(tables):
        held = [rows[t] for rows in counts]
        if DENSE in held:
            dense.append(t)
        elif any(rows != ABSENT for rows in held):
            kind = (schemes[t], table.width, table.dtype, table.wire_dtype, table.device)
            by_kind.setdefault(kind, []).append(t)
    groups = [
        _group([indices[t] for t in members], tables, members, counts, scheme_named(schemes[members[0]]).route, axis)
        for members in by_kind.values()
    ]
    return Routes(tables, dense, groups, axis)


def sum_gradients(
    gradients: Sequence[Gradient],
    tables: Sequence[Table],
    counts: Sequence[Sequence[int]],
    schemes: Sequence[str],
    axis: Axis,
) -> Deferred[list[Gradient]]:
    """Phases 2 and 3 at once, for gradients that are there. Every rank of the axis must call it.

    Args:
        gradients: This rank's, one a table, coalesced.
        tables: The tables, the same on all ranks.
        counts: What `announce` gave.
        schemes: Name of each table's scheme, the same on all ranks.
        axis: Whose ranks take part.

    Returns:
        What `Routes.sum` gives.
    """
    return route(indices_of(gradients), tables, counts, schemes, axis).sum(gradients)


def indices_of(gradients: Sequence[Gradient]) -> list[Tensor | None]:
    """The row numbers of each gradient, int64; None where it is dense or there is none."""
    return [gradient.indices.long() if isinstance(gradient, RowSparse) else None for gradient in gradients]


def count(gradient: Gradient) -> int:
    """What a rank announces of its gradient: its rows, `DENSE` or `ABSENT`."""
    if gradient is None:
        return ABSENT
    return len(gradient.indices) if isinstance(gradient, RowSparse) else DENSE


def _group(
    indices: Sequence[Tensor | None],
    tables: Sequence[Table],
    members: Sequence[int],
    counts: Sequence[Sequence[int]],
    start: Callable[[Tensor, Table, Sequence[int], Axis], Deferred[Route]],
    axis: Axis,
) -> Group:
    """Number the rows of several tables through, and route them as those of one."""
    of_members = [tables[t] for t in members]
    held = [sum(max(0, rows[t]) for t in members) for rows in counts]
    whole = as_one(of_members, [counts[axis.rank][t] for t in members])
    return Group(members, start(number_through(indices, of_members), whole, held, axis))


def as_one(tables: Sequence[Table], counts: Sequence[int]) -> Table:
    """Several tables of one kind as one whose rows are numbered through; `counts` of this rank are their shares."""
    if len(tables) == 1:
        return tables[0]
    shares = {table.name: max(0, rows) for table, rows in zip(tables, counts, strict=True)}
    return replace(tables[0], num_rows=sum(table.num_rows for table in tables), shares=shares)


def number_through(indices: Sequence[Tensor | None], tables: Sequence[Table]) -> Tensor:
    """Row numbers of several tables as those of one, ascending; None where there are none of a table."""
    numbered = [
        rows + offset if offset else rows
        for rows, offset in zip(indices, _offsets(tables), strict=True)
        if rows is not None and len(rows)
    ]
    return _end_to_end(numbered) if numbered else torch.empty(0, dtype=torch.int64, device=tables[0].device)


def split_rows(rows: Tensor, values: Tensor, tables: Sequence[Table]) -> list[RowSparse]:
    """Rows that were numbered through, ascending and distinct, with their values, by table."""
    offsets = _offsets(tables)
    ends = [len(rows)]
    if len(tables) > 1:
        ends = torch.searchsorted(rows, torch.tensor(offsets[1:]).to(rows.device, non_blocking=True)).tolist() + ends
    parts: list[RowSparse] = []
    begin = 0
    for table, offset, end in zip(tables, offsets, ends, strict=True):
        numbers = rows[begin:end] - offset if offset else rows[begin:end]
        parts.append(RowSparse.trusted(numbers, values[begin:end], table.num_rows, is_coalesced=True))
        begin = end
    return parts


def _offsets(tables: Sequence[Table]) -> list[int]:
    """The number of each table's first row where they are numbered through."""
    return [0, *accumulate(table.num_rows for table in tables[:-1])]


def _values(gradient: Gradient, table: Table) -> Tensor:
    if gradient is None:
        return table.empty().values
    assert isinstance(gradient, RowSparse), "a dense gradient was announced as dense"
    return gradient.values


def _end_to_end(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _as_dense(gradient: Gradient, table: Table) -> Tensor:
    if isinstance(gradient, Tensor):
        return gradient.clone(memory_format=torch.contiguous_format)
    return (gradient or table.empty()).to_dense()
