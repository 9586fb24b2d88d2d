"""`Unit`: rows of split tables that are fetched together, and whose gradients are pushed together.

numbers told   ->   owners serve values   ->   lookups   ->   gradients   ->   pushed to the owners
(courier)           (this thread; courier)      (autograd)                      (courier)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn

from tulle.comm import Courier, Job
from tulle.mesh import Axis
from tulle.tables import Pushed, Route, Split, Wish, fetch, push, tell, wish

TableModule = nn.Embedding | nn.EmbeddingBag


@dataclass(frozen=True, slots=True, eq=False)
class SplitTable:
    """A table of which this rank holds a part.

    Args:
        number: Among the split tables of the model, the same on all ranks.
        parameter: This rank's part.
        split: Which part that is.
        is_sparse: Whether its gradient is a sparse tensor: then rows that nobody looked up must not be in it.
        is_foreseeable: Whether rows may be fetched before the lookup: not if that renormalizes them (`max_norm`), nor
            if a lookup's gradient depends on what else it looks up (`scale_grad_by_freq`).
    """

    number: int
    parameter: nn.Parameter
    split: Split
    is_sparse: bool
    is_foreseeable: bool

    @property
    def name(self) -> str:
        """The parameter's name in the model."""
        return self.split.name


@dataclass(frozen=True, slots=True)
class Way:
    """On what the rows of split tables travel: an axis of their own and the thread that does their exchanges."""

    axis: Axis
    courier: Courier


class Unit:
    """Rows that are fetched together. Every rank must make the same units, in one order, with its own ids.

    Args:
        number: Counted alike on all ranks.
        tables: The tables.
        ids: What this rank looks up in each, or more.
        way: On what they travel.
        module: The module that looks up, if it is one lookup: its `max_norm` and `scale_grad_by_freq` hold.
        came: Called with the unit, a table and a gradient when that came.
    """

    def __init__(
        self,
        number: int,
        tables: Sequence[SplitTable],
        ids: Sequence[Tensor],
        way: Way,
        *,
        came: Callable[[Unit, SplitTable, Tensor], None],
        module: TableModule | None = None,
    ) -> None:
        self.number = number
        self.tables = {table.number: table for table in tables}
        self._wishes = {table.number: _wish(one, table.split) for table, one in zip(tables, ids, strict=True)}
        self._way = way
        self._came = came
        self._bound = (module.max_norm, module.norm_type) if module is not None and module.max_norm else None
        self.is_scaled = module is not None and module.scale_grad_by_freq
        self._told: Job[list[Route]] = way.courier.submit(partial(tell, [*self._wishes.values()], way.axis))
        self._values: Job[list[Tensor]] | None = None
        self._versions: list[int] = []
        self._rows: dict[int, ReferenceType[Tensor]] = {}
        self._lookups: dict[int, Tensor] = {}
        self._waits = {number: 0 for number in self.tables}
        """Lookups whose gradient has not come, by table."""
        self._gradients: dict[int, Tensor] = {}

    def begin_fetch(self) -> None:
        """Have the values under way, as they are now, unless these are already. Every rank must call it."""
        versions = [table.parameter._version for table in self.tables.values()]
        if self._values is not None and versions == self._versions:
            return
        routes = self._told.result()
        for route, table in zip(routes, self.tables.values(), strict=True):
            if self._bound is not None and len(route.places):
                with torch.no_grad():
                    torch.embedding_renorm_(table.parameter, torch.unique(route.places).long(), *self._bound)
        served = [route.serve(table.parameter) for route, table in zip(routes, self.tables.values(), strict=True)]
        self._versions = [table.parameter._version for table in self.tables.values()]
        self._rows.clear()
        self._values = self._way.courier.submit(partial(fetch, routes, served, self._way.axis))

    def rows(self, table: SplitTable) -> Tensor:
        """`[rows, width]`, whose gradient this unit gets if there is to be one."""
        self.begin_fetch()
        assert self._values is not None, "begun just now"
        is_trained = torch.is_grad_enabled() and table.parameter.requires_grad
        alive = self._rows.get(table.number)
        rows = alive() if alive is not None else None
        if rows is not None and is_trained:
            return rows
        values = self._values.result()[[*self.tables].index(table.number)]
        if not is_trained:
            return values
        rows = cast("Tensor", _Rows.apply(table.parameter, values, self, table))
        self._rows[table.number] = ref(rows)
        self._waits[table.number] += 1
        return rows

    def positions(self, table: SplitTable, ids: Tensor, padding: int | None) -> tuple[Tensor, int | None]:
        """Where ids lie in `rows`, and where the padding does, if it is among them.

        Raises:
            KeyError: If an id is not among the rows of this unit.
        """
        wanted = self._wishes[table.number]
        places = torch.searchsorted(wanted.rows, ids).clamp_(max=max(0, len(wanted.rows) - 1))
        if ids.numel() and not (len(wanted.rows) and torch.equal(wanted.rows[places], ids.to(wanted.rows.dtype))):
            raise KeyError(table.name)
        positions = wanted.positions[places] if len(wanted.rows) else places
        if torch.is_grad_enabled() and (table.is_sparse or self.is_scaled):
            counted = positions if padding is None else positions[ids != padding]
            counts = self._lookups.setdefault(table.number, torch.zeros(len(wanted.rows), dtype=torch.int32))
            counts += torch.bincount(counted.reshape(-1).cpu(), minlength=len(counts)).int()
        if padding is None:
            return positions, None
        place = int(torch.searchsorted(wanted.rows, padding))
        is_there = place < len(wanted.rows) and int(wanted.rows[place]) == padding
        return positions, int(wanted.positions[place]) if is_there else None

    @property
    def is_complete(self) -> bool:
        """Whether every table of the unit was looked up and has its gradient."""
        return len(self._gradients) == len(self.tables) and not any(self._waits.values())

    def gradient_came(self, table: SplitTable, gradient: Tensor) -> None:
        """Note a gradient of `rows`."""
        before = self._gradients.get(table.number)
        self._gradients[table.number] = gradient if before is None else before + gradient
        self._waits[table.number] -= 1
        self._came(self, table, gradient)

    def push(self, numbers: Sequence[int]) -> Job[list[Pushed]]:
        """Send the gradients of some of the tables to the owners; zeros for one that has none on this rank."""
        order = [*self.tables]
        tables = [self.tables[number] for number in numbers]
        routes = self._told.result()
        chosen = [routes[order.index(number)] for number in numbers]
        gradients = [self._taken(table) for table in tables]
        lookups = [
            self._counts(table).to(self._way.axis.device) if table.is_sparse or self.is_scaled else None
            for table in tables
        ]
        return self._way.courier.submit(partial(push, chosen, gradients, lookups, self._way.axis))

    def _taken(self, table: SplitTable) -> Tensor:
        gradient = self._gradients.pop(table.number, None)
        if gradient is None:
            shape = len(self._wishes[table.number].rows), table.split.width
            return table.parameter.new_zeros(shape)
        return gradient.contiguous()

    def _counts(self, table: SplitTable) -> Tensor:
        counts = self._lookups.get(table.number)
        return torch.zeros(len(self._wishes[table.number].rows), dtype=torch.int32) if counts is None else counts


class _Rows(torch.autograd.Function):
    """The values of rows, as a function of the table: their gradient goes to the unit instead."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, values: Tensor, unit: Unit, table: SplitTable) -> Tensor:
        ctx.unit, ctx.table = unit, table
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None, None]:
        ctx.unit.gradient_came(ctx.table, gradients[0])
        return None, None, None, None


def _wish(ids: Tensor, split: Split) -> Wish:
    found = wish(ids.detach(), split)
    if len(found.rows) and (int(found.rows[0]) < 0 or int(found.rows[-1]) >= split.num_rows):
        raise IndexError("index out of range in self")  # as torch says; a hook names table and row
    return found
