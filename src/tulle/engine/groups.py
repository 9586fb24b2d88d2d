"""`TableGroup`: tables whose gradients come one after the other, and travel together.

    forward                 note the ids that are looked up; when all are there:
                            tell row counts, choose, tell row numbers      -- beside forward and backward, on a thread
    gradient of a table     coalesce it, where it is born                     and a process group of its own
    all of a group there    sum the values                                 -- beside the rest of backward
    end of backward         wait

What was told is checked when the gradients are there; a wrong guess is told anew, by all ranks alike.

A table's gradient may be dense, with few rows that are not zero (`tulle.engine.assumed_dense`): those travel, and the
mean is written where the gradient lies.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from tulle.comm import Job, now_s
from tulle.engine.foresight import Foreseen, Foresight
from tulle.engine.means import as_mean
from tulle.engine.slots import Slot
from tulle.engine.tables import TableSync
from tulle.rows import RowSparse
from tulle.sync import ABSENT, Gradient, Packet, Routes, count, indices_of

_MOST_FILLED = 0.5
"""A dense gradient with more rows than this share of them is sent as it is."""


class TableGroup:
    """Tables whose gradients come one after the other, and travel together.

    Args:
        slots: Their parameters.
        sync: What all tables of the model share.
        foresights: Notes of the lookups by identity of the parameter; one that no module looks up has none.
        dense: Names of the tables, all tables of the model, whose gradients are dense.
    """

    def __init__(
        self,
        slots: Sequence[Slot],
        sync: TableSync,
        foresights: Mapping[int, Foresight],
        dense: Collection[str] = (),
    ) -> None:
        self.slots = slots
        self.missing = len(slots)
        """Tables whose gradient has not come in this backward."""
        self._sync = sync
        sync.form_bundles(slots)
        self._foresights = [foresights[id(slot.parameter)] for slot in slots if id(slot.parameter) in foresights]
        self._is_foreseeable = len(self._foresights) == len(slots)
        self._is_early = True
        self._foreseen: Sequence[Foreseen | None] = []
        self._gradients: list[Gradient] = [None] * len(slots)
        self._are_dense = [slot.name in dense for slot in slots]
        self._written: dict[int, Tensor] = {}
        """By position, dense gradients of this rank, to be made the means."""
        self._unchecked: dict[int, RowSparse | Tensor] = {}
        """By position, gradients as a GPU stored them: taken to be of the ids looked up until that is checked."""
        self._settled: Job[Routes] | None = None
        self._summed: Job[tuple[Sequence[Gradient], Packet | None]] | None = None
        self._packet: Packet | None = None
        """In which rows travel in this step; None where they are foretold."""

    @property
    def writes(self) -> int:
        """How often something was written to any of the gradients."""
        return sum(slot.parameter.grad._version for slot in self.slots if slot.parameter.grad is not None)

    @property
    def is_foreseen(self) -> bool:
        """Whether the rows of this step have been told, or will not be."""
        return bool(self._foreseen) or not self._is_foreseeable or self._packet is not None

    @property
    def is_looked_up(self) -> bool:
        """Whether forward has looked up in these tables as often as in the last step, which used to be all."""
        return self._is_early and all(foresight.is_complete for foresight in self._foresights)

    def foresee(self) -> None:
        """Tell the other ranks which rows the gradients will have; once a step, the groups in their order."""
        if self.is_foreseen:
            return
        self._foreseen = [foresight.take() for foresight in self._foresights]
        indices = [None if seen is None else seen.rows for seen in self._foreseen]
        counts = [ABSENT if rows is None else len(rows) for rows in indices]
        self._settled = self._sync.background.submit(partial(self._sync.settle, indices, counts, self.slots))

    def arrive(self, position: int) -> None:
        """Take in one table's gradient, coalesced; the parameter's own is released until the sum is there."""
        slot = self.slots[position]
        slot.arrive()
        slot.check_there()
        self._gradients[position] = self._take(position)
        slot.parameter.grad = None
        self.missing -= 1

    def start(self) -> None:
        """Send the values; tables whose gradient did not come send what they have from before."""
        for position, slot in enumerate(self.slots):
            if not slot.is_arrived:
                self._gradients[position] = self._take(position)
        for slot, gradient in zip(self.slots, self._gradients, strict=True):
            if isinstance(gradient, RowSparse):
                self._sync.ledger.rows[slot.name] = len(gradient.indices)
        self._summed = self._sync.background.submit(partial(self._sum, list(self._gradients)))

    def finish(self) -> None:
        """Wait, and give each table its mean gradient."""
        assert self._summed is not None, "tables are summed after they were started"
        # Not before: a lookup that is done again in backward would tell rows of this step anew, on some ranks only.
        sums, self._packet = self._summed.result()
        for position, (slot, total) in enumerate(zip(self.slots, sums, strict=True)):
            if isinstance(total, RowSparse) and self._are_dense[position]:
                slot.parameter.grad = as_mean(_written_to(self._written.pop(position, None), total))
            elif isinstance(total, RowSparse):
                renormalize = self._sync.settings.renormalize.get(slot.name)
                if renormalize is not None:
                    renormalize(total.indices)
                slot.parameter.grad = as_mean(total.to_sparse_coo())
            elif total is not None:
                slot.parameter.grad = as_mean(total)
            self._gradients[position] = None
            slot.is_fired = slot.is_arrived = False
        self._settled = self._summed = None
        self._foreseen = []
        self._unchecked.clear()
        self._written.clear()
        self.missing = len(self.slots)

    def _sum(self, gradients: Sequence[Gradient]) -> tuple[Sequence[Gradient], Packet | None]:
        """On the background thread: the sums, and in what rows travel in the next step."""
        begin_s = now_s()
        sums = self._summed_now(gradients)
        self._sync.note(self.slots, now_s() - begin_s)
        return sums, self._sync.packet(self.slots, self._packet)

    def _summed_now(self, gradients: Sequence[Gradient]) -> Sequence[Gradient]:
        """Sum what was foreseen, or, if nothing was or any rank was wrong, tell what is and sum that."""
        if self._settled is not None:
            is_right = all(_is_of(gradient, seen) for gradient, seen in zip(gradients, self._foreseen, strict=True))
            given = gradients if is_right else [self._stand_in(t) for t in range(len(self.slots))]
            routes = self._settled.result()
            # Before the values, behind which it would have to wait.
            confirmed = self._sync.confirm([is_right, *self._are_stored()])
            sums = routes.sum(given).wait()
            if confirmed.wait():
                return sums
            # On all ranks alike: after a first wrong guess wait for backward, after a second guess no more.
            self._is_foreseeable, self._is_early = self._is_early, False
        told = {position: self._mean(_coalesced(stored), is_ours=False) for position, stored in self._unchecked.items()}
        gradients = [told.get(position, gradient) for position, gradient in enumerate(gradients)]
        if self._packet is not None:
            return self._sync.sum_in_packet(gradients, self.slots, self._packet)
        counts = [count(gradient) for gradient in gradients]
        return self._sync.settle(indices_of(gradients), counts, self.slots).sum(gradients).wait()

    def _take(self, position: int) -> Gradient:
        gradient = self.slots[position].parameter.grad
        if gradient is None:
            return None
        if gradient.layout == torch.strided:
            with torch._C.DisableTorchFunctionSubclass():  # of a part of a layer it may know that it is one's
                return self._take_dense(position, gradient)
        rows = RowSparse.from_tensor(gradient)
        foreseen = self._foreseen[position] if self._foreseen else None
        coalesced = rows.coalesce() if foreseen is None else foreseen.coalesce(rows)
        if rows.indices.is_cuda and foreseen is not None and coalesced.indices is foreseen.rows:
            self._unchecked[position] = rows
        return self._mean(coalesced, is_ours=coalesced is not rows)

    def _take_dense(self, position: int, gradient: Tensor) -> Gradient:
        """The rows of a dense gradient in which there is something, or all of it where that is most of them."""
        if not self._are_dense[position]:
            return gradient / self._sync.axis.size
        foreseen = self._foreseen[position] if self._foreseen else None
        if foreseen is not None and (gradient.is_cuda or foreseen.is_stored(gradient)):
            rows = foreseen.rows_of(gradient)
            if gradient.is_cuda:
                self._unchecked[position] = gradient
        else:
            rows = RowSparse.from_tensor(gradient)
            if foreseen is None and len(rows.indices) > _MOST_FILLED * rows.num_rows:
                return gradient / self._sync.axis.size
        self._written[position] = gradient
        return self._mean(rows, is_ours=True)

    def _mean(self, rows: RowSparse, *, is_ours: bool) -> RowSparse:
        """This rank's share of the mean; in place where nobody else sees the values, as fresh memory is slow."""
        factor = 1.0 / self._sync.axis.size
        if not is_ours:
            return rows.scaled(factor)
        rows.values.mul_(factor)
        return rows

    def _are_stored(self) -> list[Tensor]:
        """Whether gradients on a GPU are of the ids that were looked up: it says so to all ranks, the host not asked.

        If not, what is summed has the rows that were told all the same, and is thrown away.
        """
        foreseen = {position: seen for position, seen in enumerate(self._foreseen) if seen is not None}
        return [foreseen[position].is_stored(stored) for position, stored in self._unchecked.items()]

    def _stand_in(self, position: int) -> Gradient:
        """Zeros in the rows that were told, to go through with the exchange that the others have begun."""
        foreseen, parameter = self._foreseen[position], self.slots[position].parameter
        if foreseen is None:
            return None
        values = torch.zeros(len(foreseen.rows), parameter.shape[1], dtype=parameter.dtype, device=parameter.device)
        return RowSparse.trusted(foreseen.rows, values, parameter.shape[0], is_coalesced=True)


def _is_of(gradient: Gradient, foreseen: Foreseen | None) -> bool:
    if foreseen is None or gradient is None:
        return gradient is None and foreseen is None
    return isinstance(gradient, RowSparse) and foreseen.is_of(gradient)


def _coalesced(stored: RowSparse | Tensor) -> RowSparse:
    return stored.coalesce() if isinstance(stored, RowSparse) else RowSparse.from_tensor(stored)


def _written_to(gradient: Tensor | None, total: RowSparse) -> Tensor:
    """A dense gradient with the rows of the sum, which has all of its own; in its memory, if nobody else holds that."""
    if gradient is None:
        return total.to_dense()
    held_once = object()
    is_held = sys.getrefcount(gradient) > sys.getrefcount(held_once)
    is_seen = torch._C._storage_Use_Count(gradient.untyped_storage()._cdata) > 1
    if is_held or is_seen or not torch.ops.aten.is_non_overlapping_and_dense(gradient):
        gradient = gradient.clone()
    return gradient.index_copy_(0, total.indices.long(), total.values)
