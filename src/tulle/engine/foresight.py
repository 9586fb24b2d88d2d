"""`Foresight`: which rows a backward will have gradients for, known from the forward's lookups.

    forward     embedding(ids)      note ids; after as many lookups as in the last step, their distinct rows are told
                                    to the other ranks, while the rest of the forward computes
    backward    first gradient      at the latest now they are told
                table's gradient    has it these rows? all but always: its values can leave at once

What was foreseen is checked when the gradient comes: a lookup may not reach the loss, and functional lookups are not
seen at all. A dense gradient has all rows that were looked up, zeros in some of them, and must have no others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeGuard

import torch
from torch import Tensor

from tulle.rows import Merge, RowSparse, is_row_filled
from tulle.tables import TableModule


def is_ids(given: object) -> TypeGuard[Tensor]:
    """Whether what a module was given can be row numbers: a forward of its own may take anything."""
    return isinstance(given, Tensor) and given.dtype in (torch.int32, torch.int64)


_MOST_NOTED = 2**20
"""So many ids are kept as they were looked up, or four times those of a usual step; of more, distinct rows only."""


@dataclass(frozen=True, slots=True, eq=False)
class Foreseen:
    """The rows of one table that a step's gradient should have.

    Args:
        ids: `[stored]` as looked up, without padding.
        merge: How they add up.
        lookups: How many lookups these are.
    """

    ids: Tensor
    merge: Merge
    lookups: int

    @property
    def rows(self) -> Tensor:
        """`[rows]` ascending and distinct."""
        return self.merge.rows

    def coalesce(self, gradient: RowSparse) -> RowSparse:
        """Coalesce a gradient, without another sort where it comes as the ids were looked up."""
        if gradient.is_coalesced or not self._stores_ids_of(gradient):
            return gradient.coalesce()
        values = self.merge.sum(gradient.values, are_long=True)
        return RowSparse.trusted(self.rows, values, gradient.num_rows, is_coalesced=True)

    def is_of(self, gradient: RowSparse) -> bool:
        """Whether a coalesced gradient has just these rows."""
        if gradient.indices is self.rows:
            return True
        return len(gradient.indices) == len(self.rows) and torch.equal(gradient.indices, self.rows)

    def rows_of(self, gradient: Tensor) -> RowSparse:
        """Of a dense gradient the rows that were looked up, whatever is in them."""
        values = gradient.index_select(0, self.rows)
        return RowSparse.trusted(self.rows, values, len(gradient), is_coalesced=True)

    def _stores_ids_of(self, gradient: RowSparse) -> bool:
        if len(gradient.indices) != len(self.ids):
            return False
        # To compare makes the host wait for a GPU. Of one lookup torch keeps the ids, in their order, so it is left to
        # `is_stored`, which is asked beside backward. Of several they are laid end to end as backward comes to them.
        if gradient.indices.is_cuda:
            return self.lookups == 1
        return torch.equal(gradient.indices, self.ids)

    def is_stored(self, gradient: RowSparse | Tensor) -> Tensor:
        """`[]` bool on the device: whether a gradient, as it was stored, has the ids, as many, that were looked up.

        Of a dense one whether all rows that were not looked up are zero.
        """
        if isinstance(gradient, RowSparse):
            return (gradient.indices == self.ids).all()
        is_filled = is_row_filled(gradient)
        is_filled[self.rows] = False
        return ~is_filled.any()


class Foresight:
    """Notes the lookups of one table since its gradient was last summed.

    Forwards without a backward, an evaluation without `torch.no_grad` say, may be many: then rows are noted once.
    """

    def __init__(self) -> None:
        self._noted: list[Tensor] = []
        self._noted_ids = self._ids = 0
        """Kept, and all that were looked up, since then."""
        self._most_ids = _MOST_NOTED
        self._lookups_now = 0
        self._lookups = 0
        """Of the last step."""

    @property
    def is_complete(self) -> bool:
        """Whether there were as many lookups as in the last step; False before there was one."""
        return 0 < self._lookups <= self._lookups_now

    def note(self, module: TableModule, ids: Tensor) -> None:
        """Take note of a lookup."""
        if torch.is_grad_enabled():
            ids = ids.detach().reshape(-1)
            ids = ids if module.padding_idx is None else ids[ids != module.padding_idx]
            # A forward of its own may look up others, hashed ones say: a wrong guess is found, if it can be told.
            self._noted.append(ids.clamp(0, module.num_embeddings - 1))
            self._lookups_now += 1
            self._noted_ids, self._ids = self._noted_ids + len(ids), self._ids + len(ids)
            if self._noted_ids > self._most_ids and self._lookups_now > 1:
                self._note_once()

    def take(self) -> Foreseen | None:
        """What the next gradient will have, None for no gradient; the notes stay until it is summed."""
        if not self._noted:
            return None
        ids = (self._noted[0] if len(self._noted) == 1 else torch.cat(self._noted)).long()
        return Foreseen(ids, Merge.of(ids), self._lookups_now)

    def forget(self) -> None:
        """The gradient was summed."""
        if self._lookups_now == self._lookups:  # a usual step, in which all lookups had a backward
            self._most_ids = max(_MOST_NOTED, 4 * self._ids)
        self._lookups, self._lookups_now = self._lookups_now, 0
        self._noted_ids = self._ids = 0
        self._noted.clear()

    def _note_once(self) -> None:
        """Keep each row once: a coalesced gradient has no others. What is foreseen stays the same."""
        self._noted = [torch.cat(self._noted).unique()]
        self._noted_ids = len(self._noted[0])
        self._most_ids = max(self._most_ids, 2 * self._noted_ids)
