"""Tables split by columns: every rank hears all ranks' row numbers, and serves its columns of their rows.

    forward    distinct rows --numbers--> all --columns--> put abreast, looked up here
    backward   gradients, cut by columns --> all: sum over ranks, optimizer

Any ids load all ranks alike. Each distinct row travels in as many pieces as there are ranks.

Source: Li et al., *EmbRace* (ICPP'22), sparsity-aware hybrid communication.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tulle.cost import NOTHING, Characteristics, Cost, Network, exchange_cost, work_cost
from tulle.tables.blocks import Blocks, Shape
from tulle.tables.bundle import Counts, Request, Route, as_told, count_in
from tulle.tables.distinct import Distinct, Ids
from tulle.tables.split import ColumnSplit

_COUNT_BYTES = 8


def request_of(ids: Sequence[Ids], splits: Sequence[ColumnSplit]) -> Request:
    """What lookups of ids, by table, want of all ranks."""
    distinct = Distinct.of(ids, splits)
    numbers = distinct.numbers(distinct.tables())
    told = as_told(numbers, max(split.num_rows for split in splits))
    ranks = splits[0].axis.size
    in_order = torch.arange(len(told), device=told.device)
    return Request(splits, distinct, in_order, [distinct.lengths()] * ranks, [told] * ranks)


class ColumnRoute(Route):
    """Every rank has some columns of every row."""

    __slots__ = ()

    def count(self, wanted: Tensor) -> Counts:
        """Each row is told all ranks."""
        return count_in(wanted, self.wanted[:1]) * len(self.wanted)

    def fetched_shapes(self) -> list[Shape]:
        """The columns of each rank."""
        return [(self.rows, columns) for columns in self._widths()]

    def assemble(self, blocks: Blocks) -> Tensor:
        """Columns side by side."""
        return blocks.abreast()

    def push(self, gradient: Tensor) -> Sequence[Tensor]:
        """The columns of each rank."""
        return [part.contiguous() for part in gradient.split(self._widths(), dim=1)]

    def push_counts(self, counts: Tensor) -> Sequence[Tensor]:
        """Each rank has every row."""
        return [counts] * len(self.served)

    def _widths(self) -> list[int]:
        split = self.splits[0]
        assert isinstance(split, ColumnSplit), "a route of columns is of such tables"
        return split.widths


def cost(characteristics: Characteristics, network: Network, ranks: int) -> Cost:
    """Bytes of the rank that pays most, and predicted seconds, of a step; arguments as for `tulle.tables.rows.cost`."""
    looks = characteristics.at(ranks)
    if ranks == 1:
        return NOTHING
    others = ranks - 1
    rows = torch.tensor(looks.rows_per_rank, dtype=torch.float64)
    total = rows.sum().item()
    part_bytes = looks.values_bytes / ranks
    # Forward this rank's columns of the others' rows, backward the others' columns of its own.
    sent_bytes = (total - rows) * part_bytes + others * rows * part_bytes + others * rows * looks.index_bytes
    sent_bytes += _COUNT_BYTES * others
    payer = int(sent_bytes.argmax())
    is_held = rows > 0
    reached = others * int(is_held[payer])
    messages = others + 2 * reached + int(is_held.sum()) - int(is_held[payer])
    most = rows.max().item()
    told = exchange_cost(max(others * most, total - rows.min().item()) * looks.index_bytes, 0, network, rounds=2)
    busiest_bytes = 2 * max(others * most, total - rows.min().item()) * part_bytes
    values = exchange_cost(busiest_bytes, 0, network, rounds=2)
    work = work_cost(
        network,
        summed_bytes=total * part_bytes,
        copied_bytes=total * part_bytes + 2 * most * looks.values_bytes,  # columns cut and put abreast
        numbers=2 * most + total,
    )
    return Cost(round(sent_bytes[payer].item()), messages, told.seconds + values.seconds + work.seconds)
