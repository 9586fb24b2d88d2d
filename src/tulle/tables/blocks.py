"""`Blocks`: parts of several bundles of tables that travel to each rank in one message."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from tulle.comm import Deferred, all_to_all_parts
from tulle.mesh import Axis

Shape = tuple[int, int]


def exchange_blocks(
    parts: Sequence[Sequence[Tensor]],
    shapes: Sequence[Sequence[Shape]],
    axis: Axis,
    *,
    rows: Sequence[Mapping[str, int]],
    most_bytes: Sequence[int],
) -> Deferred[list[Blocks]]:
    """Send `parts[b][r]` of each bundle b to rank r, and receive blocks of `shapes[b][r]` from it.

    Bundles of one dtype travel in one message a rank. Every rank of the axis must call it.

    Args:
        parts: `[rows, columns]` by bundle and rank.
        shapes: Of what comes, by bundle and rank; of one dtype with what goes.
        axis: Whose ranks take part.
        rows: Of each bundle how many rows of each of its tables go, by name: for the counters.
        most_bytes: Of each bundle, about what the fullest rank sends: the same numbers on all ranks.

    Returns:
        What came for each bundle.
    """
    groups: dict[torch.dtype, list[int]] = {}
    for bundle, blocks in enumerate(parts):
        groups.setdefault(blocks[0].dtype, []).append(bundle)
    under_way = [
        _exchange(
            [parts[t] for t in group],
            [shapes[t] for t in group],
            axis,
            [rows[t] for t in group],
            sum(most_bytes[t] for t in group),
        )
        for group in groups.values()
    ]

    def finish() -> list[Blocks]:
        came = [
            (table, blocks)
            for group, pending in zip(groups.values(), under_way, strict=True)
            for table, blocks in zip(group, pending.wait(), strict=True)
        ]
        return [blocks for _, blocks in sorted(came, key=lambda pair: pair[0])]

    return Deferred(finish)


class Blocks:
    """What came for one bundle: one `[rows, columns]` block from each rank."""

    def __init__(self, blocks: list[Tensor], whole: Tensor | None = None) -> None:
        self.by_rank = blocks
        self._whole = whole

    def stacked(self) -> Tensor:
        """The blocks one below the other, in the order of ranks; all have one number of columns."""
        return torch.cat(self.by_rank) if self._whole is None else self._whole

    def abreast(self) -> Tensor:
        """The blocks side by side, in the order of ranks; all have one number of rows."""
        return torch.cat(self.by_rank, dim=1)


def _exchange(
    parts: Sequence[Sequence[Tensor]],
    shapes: Sequence[Sequence[Shape]],
    axis: Axis,
    rows: Sequence[Mapping[str, int]],
    most_bytes: int,
) -> Deferred[list[Blocks]]:
    """All bundles have one dtype."""
    label = _label(parts, rows)
    widths = {columns for _, columns in shapes[0]} | {part.shape[1] for part in parts[0]}
    if len(parts) == 1 and len(widths) == 1:  # nothing to be laid end to end
        lengths = [length for length, _ in shapes[0]]
        contiguous = [part.contiguous() for part in parts[0]]
        whole = all_to_all_parts(contiguous, lengths, axis, label=label, most_bytes=most_bytes)
        return Deferred(lambda: [Blocks([*whole.wait().split(lengths)], whole.wait())])
    sends = [torch.cat([table[rank].reshape(-1) for table in parts]) for rank in range(axis.size)]
    sizes = [[math.prod(table[rank]) for table in shapes] for rank in range(axis.size)]
    flat = all_to_all_parts(sends, [sum(of_rank) for of_rank in sizes], axis, label=label, most_bytes=most_bytes)

    def finish() -> list[Blocks]:
        pieces = flat.wait().split([size for of_rank in sizes for size in of_rank])
        tables = len(parts)
        return [
            Blocks([pieces[rank * tables + t].view(shapes[t][rank]) for rank in range(axis.size)])
            for t in range(tables)
        ]

    return Deferred(finish)


def _label(parts: Sequence[Sequence[Tensor]], rows: Sequence[Mapping[str, int]]) -> Mapping[str, int]:
    """Bytes by table."""
    return {
        name: sum(part.nbytes for part in bundle) * count // max(1, sum(of_tables.values()))
        for of_tables, bundle in zip(rows, parts, strict=True)
        for name, count in of_tables.items()
    }
