"""`Foresight`: which rows a backward will have gradients for, known from the forward's lookups.

    forward     embedding(ids)      note ids; after as many lookups as in the last step, their distinct rows are told
                                    to the other ranks, while the rest of the forward computes
    backward    first gradient      at the latest now they are told
                table's gradient    has it these rows? all but always: its values can leave at once

What was foreseen is checked when the gradient comes: a lookup may not reach the loss, and functional lookups are not
seen at all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeGuard

import torch
from torch import Tensor

from tulle.rows import Merge, RowSparse
from tulle.tables import TableModule


def is_ids(given: object) -> TypeGuard[Tensor]:
    """Whether what a module was given can be row numbers: a forward of its own may take anything."""
    return isinstance(given, Tensor) and given.dtype in (torch.int32, torch.int64)


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
        values = self.merge.sum(gradient.values)
        return RowSparse.trusted(self.rows, values, gradient.num_rows, is_coalesced=True)

    def is_of(self, gradient: RowSparse) -> bool:
        """Whether a coalesced gradient has just these rows."""
        if gradient.indices is self.rows:
            return True
        return len(gradient.indices) == len(self.rows) and torch.equal(gradient.indices, self.rows)

    def _stores_ids_of(self, gradient: RowSparse) -> bool:
        if len(gradient.indices) != len(self.ids):
            return False
        # To compare makes the host wait for a GPU. Of one lookup torch keeps the ids, in their order, so it is left to
        # `is_stored`, which is asked beside backward. Of several they are laid end to end as backward comes to them.
        if gradient.indices.is_cuda:
            return self.lookups == 1
        return torch.equal(gradient.indices, self.ids)

    def is_stored(self, gradient: RowSparse) -> bool:
        """Whether a gradient, as it was stored, has the ids that were looked up."""
        return torch.equal(gradient.indices, self.ids)


class Foresight:
    """Notes the lookups of one table since its gradient was last summed."""

    def __init__(self) -> None:
        self._noted: list[Tensor] = []
        self._lookups = 0

    @property
    def is_complete(self) -> bool:
        """Whether there were as many lookups as in the last step; False before there was one."""
        return 0 < self._lookups <= len(self._noted)

    def note(self, module: TableModule, ids: Tensor) -> None:
        """Take note of a lookup."""
        if torch.is_grad_enabled():
            ids = ids.detach().reshape(-1)
            ids = ids if module.padding_idx is None else ids[ids != module.padding_idx]
            # A forward of its own may look up others, hashed ones say: a wrong guess is found, if it can be told.
            self._noted.append(ids.clamp(0, module.num_embeddings - 1))

    def take(self) -> Foreseen | None:
        """What the next gradient will have, None for no gradient; the notes stay until it is summed."""
        if not self._noted:
            return None
        ids = (self._noted[0] if len(self._noted) == 1 else torch.cat(self._noted)).long()
        return Foreseen(ids, Merge.of(ids), len(self._noted))

    def forget(self) -> None:
        """The gradient was summed."""
        self._lookups = len(self._noted)
        self._noted.clear()
