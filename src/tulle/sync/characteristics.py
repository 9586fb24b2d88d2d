"""`tulle.sync.characteristics`: what gradients of tables look like on the ranks of an axis, as Zen measures them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import cast, overload

import torch
from torch import Tensor

from tulle.comm import all_gather, gather_values, raise_together
from tulle.cost import Characteristics
from tulle.errors import GradientError
from tulle.mesh import Axis, check_axis
from tulle.partition import Hashed
from tulle.presence import Presence
from tulle.rows import RowSparse
from tulle.sync.given import check_device, check_indices
from tulle.sync.numbers import gather_numbers
from tulle.sync.table import Table

SAMPLED_ROWS = 2**17
"""Of more rows than this a rank tells a sample, the same rows on all ranks, so that the ratios stay what they are."""
Grad = RowSparse | Tensor
_LABEL = "characteristics"


@overload
def characteristics(grads: Grad, axis: Axis) -> Characteristics: ...
@overload
def characteristics(grads: Mapping[str, Grad], axis: Axis) -> dict[str, Characteristics]: ...
@overload
def characteristics(grads: Iterable[Grad], axis: Axis) -> list[Characteristics]: ...
@torch.no_grad()
def characteristics(
    grads: Grad | Iterable[Grad] | Mapping[str, Grad], axis: Axis
) -> Characteristics | list[Characteristics] | dict[str, Characteristics]:
    """Measure density, overlap, densification and skewness of gradients. Every rank of the axis must call it.

    With `I_r` the rows that rank r holds, of `V` in the table, and n ranks (Zen, OSDI'25, section 2.3, over rows):

        density               d    = mean_r |I_r| / V
        overlap_ratio              = mean over pairs of |I_r n I_q| / min(|I_r|, |I_q|)
        densification_ratio   g^n  = |I_0 u ... u I_n-1| / mean_r |I_r|
        skewness_ratio        s^n  = mean_r max_i n |I_r in part i| / |I_r|, the table cut into n contiguous parts

    Row numbers travel, values do not. A table of which a rank holds more than 131,072 rows is sampled.

    Args:
        grads: This rank's gradient of one table (`RowSparse`, sparse COO, or dense, of which the rows that are not all
            zero count), or several in an iterable or a mapping, alike on all ranks.
        axis: Whose ranks take part.

    Returns:
        `Characteristics`, or as many in a list or under the same names.

    Raises:
        MeshError: If `axis` is no `Axis`.
        GradientError: On every rank, if a gradient is of another kind or on another device than the axis, has an index
            out of range, or the tables differ between ranks.

    Example:
        >>> import torch, tulle
        >>> mesh = tulle.init(data=-1)
        >>> grad = tulle.RowSparse(torch.tensor([2, 4, 2]), torch.ones(3, 8), num_rows=10)
        >>> looks = tulle.sync.characteristics(grad, mesh["data"])
        >>> looks.density, looks.densification_ratio, looks.skewness_ratio
        (0.2, 1.0, 1.0)
    """
    check_axis(axis, by="tulle.sync.characteristics")
    if isinstance(grads, Mapping):
        named = cast("Mapping[str, Grad]", grads)
        return dict(zip(named, _measure([*named.values()], axis, [*named]), strict=True))
    if isinstance(grads, Iterable) and not isinstance(grads, Tensor):
        return _measure([*grads], axis)
    return _measure([grads], axis)[0]


def gather_presence(
    indices: Sequence[Tensor], tables: Sequence[Table], counts: Sequence[Sequence[int]], axis: Axis
) -> list[Presence]:
    """Which ranks hold which rows of each table. Every rank of the axis must call it.

    Args:
        indices: This rank's row numbers by table, int64, ascending and distinct.
        tables: The tables, the same on all ranks.
        counts: `counts[r][t]`, the rows of table t on rank r; negative for none.
        axis: Whose ranks take part.
    """
    thinned = [-(-max(0, *(rows[t] for rows in counts), 1) // SAMPLED_ROWS) for t in range(len(tables))]
    parts = [_thin(part, table, by) for part, table, by in zip(indices, tables, thinned, strict=True)]
    mine = torch.tensor([len(part) for part in parts])
    held: list[list[int]] = all_gather(mine.to(axis.device), axis, label=_LABEL).wait().tolist()
    offsets = [0]
    for table in tables:
        offsets.append(offsets[-1] + table.num_rows)
    numbered = torch.cat([part + offset for part, offset in zip(parts, offsets, strict=False)])
    whole = replace(tables[0], name=_LABEL, num_rows=offsets[-1], shares=None)
    gathered = gather_numbers(numbered, [sum(rows) for rows in held], whole.num_rows, whole, axis).wait()
    by_rank = [part.split(rows) for part, rows in zip(gathered, held, strict=True)]
    return [
        replace(Presence.of([rank[t] - offsets[t] for rank in by_rank]), share=1 / thinned[t])
        for t in range(len(tables))
    ]


def _measure(grads: Sequence[Grad], axis: Axis, names: Sequence[str] = ()) -> list[Characteristics]:
    refusal: GradientError | None = None
    rows: list[RowSparse] = []
    try:
        rows = [_rows(grad, axis) for grad in grads]
    except GradientError as found:
        refusal = found
    raise_together(refusal, axis, label=_LABEL)
    tables = [Table(_LABEL, *grad.shape, grad.values.dtype, grad.values.device) for grad in rows]
    shapes = [*names] + [(table.num_rows, table.width, str(table.dtype)) for table in tables]
    heard = gather_values((shapes, [len(grad.indices) for grad in rows]), axis, label=_LABEL)
    for rank, other in enumerate(heard):
        if other[0] != heard[0][0]:
            raise GradientError(
                f"tulle.sync.characteristics was given gradients of {other[0]} on rank {rank} of axis {axis.name!r} "
                f"and of {heard[0][0]} on rank 0: give the same tables on every rank"
            )
    if not tables:
        return []
    counts = [held for _, held in heard]
    presences = gather_presence([grad.indices.long() for grad in rows], tables, counts, axis)
    return [table.characteristics([held[t] for held in counts], presences[t]) for t, table in enumerate(tables)]


def _rows(grad: Grad, axis: Axis) -> RowSparse:
    if not isinstance(grad, RowSparse | Tensor):
        raise GradientError(
            f"tulle.sync.characteristics was given a {type(grad).__name__}, "
            "expected a RowSparse, a sparse COO tensor or a dense tensor"
        )
    check_device(grad, axis, by="tulle.sync.characteristics")
    check_indices(grad, by="tulle.sync.characteristics")
    return (grad if isinstance(grad, RowSparse) else RowSparse.from_tensor(grad.detach())).coalesce()


def _thin(part: Tensor, table: Table, by: int) -> Tensor:
    """One row in `by`, the same on all ranks, whatever the ids look like."""
    return part if by == 1 else part[Hashed(table.num_rows, by).place(part)[0] == 0]
