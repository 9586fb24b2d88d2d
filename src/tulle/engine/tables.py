"""`TableSync`: keeps replicated tables with sparse gradients in step, and chooses the scheme of each as it goes.

    backward of a table      coalesce its gradient, where it is born
    all tables are there     announce: one small all-gather of row counts
    end of backward          counts are here: choose, then sum the tables of one scheme together

Every rank hears the same counts, so every rank makes the same choice, and nobody has to ask.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tulle.comm import Deferred, lane
from tulle.cost import Network
from tulle.engine.buckets import Slot
from tulle.mesh import Axis
from tulle.rows import RowSparse
from tulle.sync import ABSENT, AUTO, DENSE, Choice, Gradient, Table, announce, choose, sum_gradients

logger = logging.getLogger("tulle")

DRIFT = 1.5
"""The scheme is chosen again when the mean number of rows has moved by this factor since the last choice."""
_MEMORY = 0.9
"""Weight of the past in the running mean of rows."""


@dataclass(slots=True)
class _State:
    """What is known of one table's gradients."""

    choice: Choice | None = None
    rows_at_choice: float = 0.0
    mean_rows: float = 0.0


class TableSync:
    """The tables of one model on one axis.

    Args:
        slots: Their parameters, in the same order on all ranks.
        axis: Whose ranks hold replicas.
        network: What the axis gives, the same numbers on all ranks.
        schemes: A scheme's name by parameter name; `"auto"`, or absent, means chosen by measured rows.
        renormalize: By parameter name, what an embedding with `max_norm` does to the rows that it looks up.
    """

    def __init__(
        self,
        slots: Sequence[Slot],
        axis: Axis,
        *,
        network: Network,
        schemes: Mapping[str, str],
        renormalize: Mapping[str, Callable[[Tensor], None]],
    ) -> None:
        self.slots = slots
        self.axis = axis
        # On a group of their own, so that a few rows do not wait behind the buckets that are under way.
        self._lane = lane(axis, "tables")
        self.network = network
        self._schemes = schemes
        self._renormalize = renormalize
        self._states = {slot.name: _State() for slot in slots}
        self._gradients: list[Gradient] = [None] * len(slots)
        self._counts: Deferred[list[list[int]]] | None = None
        self.missing = len(slots)
        """Tables whose gradient has not come in this backward."""
        self.rows: dict[str, int] = {}
        """Distinct rows of this rank's last gradient by table."""

    @property
    def choices(self) -> dict[str, Choice]:
        """The choice in force for each table that was not given a scheme and has had a gradient."""
        return {name: state.choice for name, state in self._states.items() if state.choice is not None}

    def scheme(self, name: str) -> str:
        """The scheme in force for a table: given, chosen, or `"auto"` before the first choice."""
        choice = self._states[name].choice
        return choice.scheme if choice else self._schemes.get(name, AUTO)

    def arrive(self, position: int) -> None:
        """Take in one table's gradient, coalesced; the parameter's own is released until the sum is there."""
        slot = self.slots[position]
        slot.arrive()
        self._gradients[position] = self._take(slot)
        slot.parameter.grad = None
        self.missing -= 1

    def start(self) -> None:
        """Announce the row counts; tables whose gradient did not come send what they have from before."""
        for position, slot in enumerate(self.slots):
            if not slot.is_arrived:
                self._gradients[position] = self._take(slot)
        self.rows = {
            slot.name: len(gradient.indices)
            for slot, gradient in zip(self.slots, self._gradients, strict=True)
            if isinstance(gradient, RowSparse)
        }
        self._counts = announce(self._gradients, self._lane)

    def finish(self) -> None:
        """Hear the counts, choose, sum, and give each table its mean gradient."""
        assert self._counts is not None, "tables are summed after they were announced"
        counts = self._counts.wait()
        tables = [_table(slot, gradient) for slot, gradient in zip(self.slots, self._gradients, strict=True)]
        for position, table in enumerate(tables):
            self._observe(table, [rows[position] for rows in counts])
        schemes = [self.scheme(slot.name) for slot in self.slots]
        sums = sum_gradients(self._gradients, tables, counts, schemes, self._lane).wait()
        for position, (slot, total) in enumerate(zip(self.slots, sums, strict=True)):
            if isinstance(total, RowSparse):
                renormalize = self._renormalize.get(slot.name)
                if renormalize is not None:
                    renormalize(total.indices)
                slot.parameter.grad = total.to_sparse_coo()
            elif total is not None:
                slot.parameter.grad = total
            self._gradients[position] = None
            slot.is_fired = slot.is_arrived = False
        self._counts = None
        self.missing = len(self.slots)

    def _take(self, slot: Slot) -> Gradient:
        gradient = slot.parameter.grad
        if gradient is None:
            return None
        if gradient.layout == torch.strided:
            return gradient / self.axis.size
        return RowSparse.from_tensor(gradient).coalesce().scaled(1.0 / self.axis.size)

    def _observe(self, table: Table, counts: Sequence[int]) -> None:
        """Keep the running mean of rows, and choose again if it has drifted."""
        if self._schemes.get(table.name, AUTO) != AUTO or DENSE in counts or all(n == ABSENT for n in counts):
            return
        held = [max(0, count) for count in counts]
        state = self._states[table.name]
        mean_rows = sum(held) / len(held)
        state.mean_rows = _MEMORY * state.mean_rows + (1 - _MEMORY) * mean_rows if state.choice else mean_rows
        low, high = sorted((state.mean_rows + 1, state.rows_at_choice + 1))
        if state.choice is not None and high < DRIFT * low:
            return
        before = state.choice.scheme if state.choice else None
        state.choice = choose(table.characteristics(held), self.network, self.axis.size)
        state.rows_at_choice = state.mean_rows = mean_rows
        if before != state.choice.scheme and self.axis.rank == 0:
            logger.info("table %s: %s", table.name, state.choice.reason)


def compact(parameter: nn.Parameter) -> None:
    """Coalesce a sparse gradient in place, so that accumulation over micro-batches keeps one row for each number."""
    gradient = parameter.grad
    if gradient is not None and gradient.layout == torch.sparse_coo and not gradient.is_coalesced():
        parameter.grad = RowSparse.from_tensor(gradient).coalesce().to_sparse_coo()


def _table(slot: Slot, gradient: Gradient) -> Table:
    parameter = slot.parameter
    values = gradient.values if isinstance(gradient, RowSparse) else parameter
    return Table(slot.name, parameter.shape[0], parameter.shape[1], parameter.dtype, values.device)
