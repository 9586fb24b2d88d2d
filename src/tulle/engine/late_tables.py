"""`LateTable`: the gradient of a part of a split table, of which prior rows have come and delayed ones are on the way.

    backward       prior rows pushed             delayed rows ------------------------------->
    step                              noted                                                    done: by who reads, or
    next fetch                                rows as they will be, from prior ones              before the next step

The rows that the next batch wants are worked out ahead, on a copy, by the optimizer's own code; they need prior rows
only. The step itself is done once, on the whole part, when all is there: so state and numbers are those of one process.

Source: Li et al., *EmbRace* (ICPP'22), vertical scheduling.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tulle.engine.split_table import SplitTable
from tulle.engine.trips import Delay, Pushes
from tulle.mesh import Axis
from tulle.rows import RowSparse
from tulle.tables import Pushed, gradient_of_table


@dataclass(frozen=True, slots=True)
class Kind:
    """Of a part of a table what its gradients depend on.

    Args:
        number: Of the table.
        rows: Of the part.
        dtype: Of its values.
        is_sparse: Whether its gradients are sparse tensors.
    """

    number: int
    rows: int
    dtype: torch.dtype
    is_sparse: bool

    @staticmethod
    def of(table: SplitTable) -> Kind:
        """Of the part that this rank holds."""
        return Kind(table.number, table.split.local_shape[0], table.parameter.dtype, table.is_sparse)


@dataclass(frozen=True, slots=True, eq=False)
class MeanRows:
    """The mean over ranks of the gradients of some rows of a part.

    Args:
        places: `[rows]` where they lie, ascending.
        values: `[rows, width]`, or this rank's columns of them.
    """

    places: Tensor
    values: Tensor

    @staticmethod
    def of(pushed: Pushed, kind: Kind, axis: Axis, *, is_scaled: bool = False) -> MeanRows:
        """From the sum that was pushed here; `is_scaled` by how often each row was looked up."""
        places, values = pushed.places, pushed.values
        if pushed.lookups is not None and is_scaled:
            values = values / pushed.lookups.clamp(min=1).unsqueeze(1)
        if pushed.lookups is not None and kind.is_sparse:
            is_held = pushed.lookups > 0
            if not bool(is_held.all()):
                places, values = places[is_held], values[is_held]
        return MeanRows(places, values.div_(axis.size).to(kind.dtype))

    def together(self, other: MeanRows) -> MeanRows:
        """With other rows, none of which is among these."""
        places, order = torch.cat([self.places, other.places]).sort()
        return MeanRows(places, torch.cat([self.values, other.values]).index_select(0, order))

    def at(self, places: Tensor) -> MeanRows:
        """Those that lie at some places, which may be named several times; numbered as they are named."""
        places = places.long()
        found = torch.searchsorted(self.places, places).clamp_(max=max(0, len(self.places) - 1))
        named = (self.places[found] == places).nonzero().squeeze(1) if len(self.places) else found[:0]
        return MeanRows(named, self.values.index_select(0, found[named]))

    def to_gradient(self, rows: int, *, is_sparse: bool) -> Tensor:
        """As a gradient of `[rows, width]`."""
        if is_sparse:
            return RowSparse.trusted(self.places, self.values, rows, is_coalesced=True).to_sparse_coo()
        return self.values.new_zeros(rows, self.values.shape[1]).index_copy_(0, self.places, self.values)


class LateTable:
    """The gradient of one table in one step.

    Args:
        table: The table.
        prior: What has come.
        delayed: What is on the way.
        delay: How that goes.
        axis: Whose ranks hold the table.
    """

    def __init__(self, table: SplitTable, prior: MeanRows, delayed: Pushes, delay: Delay, axis: Axis) -> None:
        self.table = table
        self.following = delay.following
        self._rows = _Rows(Kind.of(table), prior, delayed, delay.let_pass, axis)
        none = self._rows.of_part(MeanRows(prior.places[:0], prior.values[:0]))
        self._gradient = gradient_of_table(none, table.split, axis)

    @property
    def gradients(self) -> list[tuple[nn.Parameter, Tensor]]:
        """The parameter and its gradient, which has no values before `finish`."""
        return [(self.table.parameter, self._gradient)]

    def ahead(self, places: Tensor) -> Tensor:
        """The gradient of prior rows that lie at some places, and of rows that have none: `[len(places), width]`."""
        return self._rows.prior.at(places).to_gradient(len(places), is_sparse=self.table.is_sparse)

    def whole(self) -> MeanRows:
        """All rows: waits for the delayed ones, which need not let others pass any more.

        Raises:
            CommunicationError: If a rank is gone.
        """
        return self._rows.whole()

    def finish(self) -> None:
        """Complete the gradient."""
        self._rows.complete(self._gradient)

    def alone(self) -> Callable[[Tensor], None]:
        """What completes the gradient when its parameter may be gone."""
        return self._rows.complete


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """Those of one gradient, without the parameter whose it is.

    Args:
        kind: Of the part.
        prior: What has come.
        delayed: What is on the way.
        let_pass: To be set when delayed rows need not let others pass any more; none are left when those have.
        axis: Whose ranks hold the table.
    """

    kind: Kind
    prior: MeanRows
    delayed: Pushes
    let_pass: list[threading.Event]
    axis: Axis

    def whole(self) -> MeanRows:
        for others in [*self.let_pass]:
            others.set()
        delayed = MeanRows.of(self.delayed.result()[self.kind.number], self.kind, self.axis)
        return self.prior.together(delayed)

    def complete(self, gradient: Tensor) -> None:
        whole = self.of_part(self.whole())
        with torch._C.DisableTorchFunctionSubclass():
            gradient.data = whole

    def of_part(self, rows: MeanRows) -> Tensor:
        return rows.to_gradient(self.kind.rows, is_sparse=self.kind.is_sparse)
