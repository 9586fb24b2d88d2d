"""Scheme `allgather`: every rank gets every rank's rows, and sums them (Zen's AGsparse, OSDI'25 section 3.2).

Rows are coalesced before they are sent, which Horovod and DeepSpeed do not do. All tables of a step travel in one
message, and no part is padded to the longest.

    a rank's message    | numbers of table 0 | numbers of table 1 | values of table 0 | values of table 1 |
                          int32, each section begins at a multiple of 8 bytes
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tulle.comm import Deferred, all_gather_parts
from tulle.cost import Characteristics, Cost, Network, exchange_cost
from tulle.mesh import Axis
from tulle.rows import RowSparse
from tulle.sync.table import Table

_ALIGNMENT_BYTES = 8


def all_reduce(
    gradients: Sequence[RowSparse], tables: Sequence[Table], counts: Sequence[Sequence[int]], axis: Axis
) -> Deferred[list[RowSparse]]:
    """Sum row-sparse gradients over the axis. Every rank of the axis must call it.

    Args:
        gradients: This rank's gradient of each table, coalesced.
        tables: The tables, the same on all ranks.
        counts: `counts[r][t]`, the rows of table t on rank r, the same on all ranks.
        axis: Whose ranks take part.

    Returns:
        The sums, coalesced; bitwise the same on all ranks, because all of them add in the order of ranks.
    """
    layouts = [_sections(tables, rows) for rows in counts]
    message = _pack(gradients, tables, layouts[axis.rank])
    shares = {
        table.name: table.characteristics(()).row_bytes * n for table, n in zip(tables, counts[axis.rank], strict=True)
    }
    lengths = [layout[-1] for layout in layouts]
    gathered = all_gather_parts(message, lengths, axis, label=shares)

    def finish() -> list[RowSparse]:
        parts = [_unpack(part, tables, rows) for part, rows in zip(gathered.wait(), counts, strict=True)]
        return [_sum([part[t] for part in parts]) for t in range(len(tables))]

    return Deferred(finish)


def cost(characteristics: Characteristics, network: Network, ranks: int) -> Cost:
    """`(n - 1) d M` and the row numbers, where the rank with most rows sets the pace; all rounds start at once."""
    most_rows = max(characteristics.rows_per_rank, default=0)
    others = ranks - 1
    return exchange_cost(others * most_rows * characteristics.row_bytes, others, network, rounds=min(1, others))


def _sections(tables: Sequence[Table], rows: Sequence[int]) -> list[int]:
    """Offsets in bytes at which the sections of a rank's message begin, and its length."""
    sizes = [n * table.index_dtype.itemsize for table, n in zip(tables, rows, strict=True)]
    sizes += [n * table.width * table.dtype.itemsize for table, n in zip(tables, rows, strict=True)]
    offsets = [0]
    for size in sizes:
        offsets.append(offsets[-1] + -(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES)
    return offsets


def _pack(gradients: Sequence[RowSparse], tables: Sequence[Table], offsets: Sequence[int]) -> Tensor:
    message = torch.empty(offsets[-1], dtype=torch.uint8, device=tables[0].device)
    sections = [g.indices.to(t.index_dtype) for g, t in zip(gradients, tables, strict=True)]
    sections += [g.values.contiguous().view(-1) for g in gradients]
    for section, offset in zip(sections, offsets, strict=False):
        message[offset : offset + section.nbytes].view(section.dtype).copy_(section)
    return message


def _unpack(message: Tensor, tables: Sequence[Table], rows: Sequence[int]) -> list[RowSparse]:
    offsets = _sections(tables, rows)

    def section(number: int, length: int, dtype: torch.dtype) -> Tensor:
        return message[offsets[number] : offsets[number] + length * dtype.itemsize].view(dtype)

    return [
        RowSparse.trusted(
            section(t, n, table.index_dtype),
            section(len(tables) + t, n * table.width, table.dtype).view(n, table.width),
            table.num_rows,
            is_coalesced=True,
        )
        for t, (table, n) in enumerate(zip(tables, rows, strict=True))
    ]


def _sum(parts: Sequence[RowSparse]) -> RowSparse:
    touched = [part for part in parts if len(part.indices)]
    if len(touched) <= 1:
        only = touched[0] if touched else parts[0]
        return RowSparse.trusted(only.indices.long(), only.values, only.num_rows, is_coalesced=True)
    indices = torch.cat([part.indices for part in touched]).long()
    values = torch.cat([part.values for part in touched])
    return RowSparse.trusted(indices, values, parts[0].num_rows).coalesce()
