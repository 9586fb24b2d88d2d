"""`Candidates`: the rows of this rank, with what is added to their logits, and the targets that lie here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tulle.parts import local_of
from tulle.softmax.part import Part, wide
from tulle.softmax.shard import Shard


@dataclass(frozen=True, slots=True, eq=False)
class Targets:
    """The tokens, of all ranks, whose target lies here.

    Args:
        tokens: `[here]` their numbers among all, ascending.
        places: `[here]` of their targets.
        rows: `[here]` their targets.
        logits: `[here]` of their targets.
    """

    tokens: Tensor
    places: Tensor
    rows: Tensor
    logits: Tensor


class Candidates:
    """The rows that lie here, as a softmax chooses among them and those of the other ranks.

    Args:
        weight: `[places, width]`.
        bias: `[num_rows]`, of the whole table, or None.
        shard: Which rows these are.
        dtype: In which rows and hidden states are multiplied.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, shard: Shard, dtype: torch.dtype) -> None:
        self.shard = shard
        self.table = local_of(weight).to(dtype)
        self.wide = wide(dtype)
        self._bias = None if bias is None else local_of(bias).to(self.wide)
        self.rows, is_held = (values.to(weight.device) for values in shard.rows())
        self.is_held = None if bool(is_held.all()) else is_held
        """`[places]` whether there is a row; None if there is one at each."""

    def part(self, logits_bytes: int, kept: Mapping[int, Tensor] | None = None) -> Part:
        """What scores them, with what it kept in forward."""
        offset = None if self._bias is None else self._bias[self.rows]
        if self.is_held is not None:
            offset = self.table.new_zeros(len(self.rows), dtype=self.wide) if offset is None else offset
            offset = offset.masked_fill(~self.is_held, -torch.inf)
        return Part(self.table, offset, logits_bytes, kept or {})

    def find(self, rows: Tensor, hidden: Tensor) -> Targets:
        """The targets that lie here, `rows` and `hidden` being of all ranks' tokens."""
        is_here, places = self.shard.locate(rows)
        tokens = is_here.nonzero().squeeze(1)
        rows, places = rows[tokens], places[tokens]
        of_tokens, of_rows = hidden.index_select(0, tokens), self.table.index_select(0, places)
        logits = (of_tokens.to(self.wide) * of_rows.to(self.wide)).sum(1)
        return Targets(tokens, places, rows, logits if self._bias is None else logits + self._bias[rows])

    def sum_of_logits(self, hidden: Tensor) -> Tensor:
        """Of each token over all rows here: `[tokens]`."""
        total = hidden.to(self.wide) @ self.sum_of_rows()
        if self._bias is None:
            return total
        of_rows = self._bias[self.rows]
        return total + (of_rows if self.is_held is None else of_rows[self.is_held]).sum()

    def sum_of_rows(self) -> Tensor:
        """`[width]` over all rows here; places without one hold zeros."""
        return self.table.sum(0, dtype=self.wide)
