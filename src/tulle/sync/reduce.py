"""Sums the gradients of several tables in one go, whatever kind each rank has: rows, dense, or none.

    phase 1  announce   one small all-gather: how many rows each rank has of each table, or that it is dense or absent
    phase 2  sum        tables of one scheme together, with sizes that everybody now knows on the CPU

A table of which any rank has a dense gradient (tied to an output layer, say) is summed dense: the rule of
*Densifying Assumed-sparse Tensors*, section 3.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tulle.comm import Deferred, all_gather
from tulle.comm import all_reduce as reduce_dense
from tulle.mesh import Axis
from tulle.rows import RowSparse
from tulle.sync.schemes import SCHEMES
from tulle.sync.table import Table

Gradient = RowSparse | Tensor | None
"""Of one table on one rank: coalesced rows, a dense tensor, or nothing."""

DENSE = -1
"""Announced for a dense gradient."""
ABSENT = -2
"""Announced where there is no gradient."""


def announce(gradients: Sequence[Gradient], axis: Axis) -> Deferred[list[list[int]]]:
    """Phase 1: tell every rank what this one has. Every rank of the axis must call it.

    Returns:
        `counts[r][t]`: rows of table t on rank r, -1 if dense there, -2 if there is none.
    """
    mine = torch.tensor([count(gradient) for gradient in gradients], dtype=torch.int64)
    gathered = all_gather(mine.to(axis.device, non_blocking=True), axis, label="row counts")
    return Deferred(lambda: gathered.wait().tolist())


def sum_gradients(
    gradients: Sequence[Gradient],
    tables: Sequence[Table],
    counts: Sequence[Sequence[int]],
    schemes: Sequence[str],
    axis: Axis,
) -> Deferred[list[Gradient]]:
    """Phase 2: sum each table's gradient over the axis. Every rank of the axis must call it.

    Args:
        gradients: This rank's, one a table.
        tables: The tables, the same on all ranks.
        counts: What `announce` gave.
        schemes: Name of each table's scheme, the same on all ranks.
        axis: Whose ranks take part.

    Returns:
        The sums: coalesced rows, a dense tensor where any rank's was dense, None where no rank had any.
    """
    started: list[tuple[list[int], Deferred[list[RowSparse]] | Deferred[list[Tensor]]]] = []
    by_scheme: dict[str, list[int]] = {}
    for t in range(len(tables)):
        held = [rows[t] for rows in counts]
        if DENSE in held:
            dense = _as_dense(gradients[t], tables[t])
            pending = reduce_dense(dense, axis, label=tables[t].name)
            started.append(([t], Deferred(lambda pending=pending: [pending.wait()])))
        elif any(rows != ABSENT for rows in held):
            by_scheme.setdefault(schemes[t], []).append(t)
    known = [[max(0, held) for held in rows] for rows in counts]
    for name, members in by_scheme.items():
        pending = SCHEMES[name].all_reduce(
            [_as_rows(gradients[t], tables[t]) for t in members],
            [tables[t] for t in members],
            [[rows[t] for t in members] for rows in known],
            axis,
        )
        started.append((members, pending))

    def finish() -> list[Gradient]:
        sums: list[Gradient] = [None] * len(tables)
        for members, pending in started:
            for t, total in zip(members, pending.wait(), strict=True):
                sums[t] = total
        return sums

    return Deferred(finish)


def count(gradient: Gradient) -> int:
    """What a rank announces of its gradient: its rows, `DENSE` or `ABSENT`."""
    if gradient is None:
        return ABSENT
    return len(gradient.indices) if isinstance(gradient, RowSparse) else DENSE


def _as_dense(gradient: Gradient, table: Table) -> Tensor:
    if isinstance(gradient, Tensor):
        return gradient.clone(memory_format=torch.contiguous_format)
    return (gradient or table.empty()).to_dense()


def _as_rows(gradient: Gradient, table: Table) -> RowSparse:
    if gradient is None:
        return table.empty()
    assert isinstance(gradient, RowSparse), "a dense gradient was announced as dense"
    return gradient
