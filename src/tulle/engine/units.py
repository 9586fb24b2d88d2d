"""`Unit`: rows of split tables that are fetched together, and whose gradients are pushed together.

    numbers told   ->   owners serve values   ->   lookups   ->   gradients   ->   pushed to the owners
    (courier)           (this thread; courier)      (autograd)                      (courier)

Values are served as they are when the fetch begins; if a table changes before the lookup, they are fetched anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from tulle.comm import Courier, Job
from tulle.mesh import Axis
from tulle.tables import Pushed, Route, Split, bundles, fetch, push, tell, wish

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
        found = bundles([(table.split, table.parameter.dtype) for table in tables])
        self._bundles = [[tables[t] for t in of_bundle] for of_bundle in found]
        self._places = {table.number: (b, t) for b, some in enumerate(self._bundles) for t, table in enumerate(some)}
        self._wishes = [
            wish([ids[t].detach() for t in of_bundle], [tables[t].split for t in of_bundle]) for of_bundle in found
        ]
        self._way = way
        self._came = came
        self._bound = (module.max_norm, module.norm_type) if module is not None and module.max_norm else None
        self.is_scaled = module is not None and module.scale_grad_by_freq
        self._told: Job[list[Route]] = way.courier.submit(partial(tell, self._wishes, way.axis))
        self._values: Job[list[Tensor]] | None = None
        self._versions: list[int] = []
        self._lookups: dict[int, Tensor] = {}
        """How often each row was looked up by lookups whose gradient came, by table."""
        self._waits = dict.fromkeys(self.tables, 0)
        """Lookups whose gradient has not come, by table."""
        self._gradients: dict[int, Tensor] = {}

    def rows(self) -> dict[int, int]:
        """How many distinct rows of each table this rank wants, by number of the table."""
        return {number: len(self._wishes[bundle].distinct.of_table(t)) for number, (bundle, t) in self._places.items()}

    def begin_fetch(self) -> None:
        """Have the values under way, as they are now, unless these are already. Every rank must call it."""
        if self._values is not None and self._current_versions() == self._versions:
            return
        routes = self._told.result()
        if self._bound is not None and routes[0].places.numel():
            [table] = self.tables.values()
            with torch.no_grad():
                torch.embedding_renorm_(table.parameter, torch.unique(routes[0].places).long(), *self._bound)
        served = [
            route.serve([table.parameter for table in tables])
            for route, tables in zip(routes, self._bundles, strict=True)
        ]
        self._versions = self._current_versions()
        self._values = self._way.courier.submit(partial(fetch, routes, served, self._way.axis))

    def look_up(self, table: SplitTable, ids: Tensor, padding: int | None) -> tuple[Tensor, Tensor, int | None]:
        """Rows of a table, where in them ids lie, and where the padding does, if it is among them.

        The gradient of the rows comes to this unit, if there is to be one.

        Raises:
            KeyError: If an id is not among the rows of this unit.
        """
        self.begin_fetch()
        assert self._values is not None, "begun just now"
        bundle, t = self._places[table.number]
        distinct = self._wishes[bundle].distinct
        wanted, base = distinct.of_table(t), distinct.bases[t]
        keys = (ids + base if base else ids).long().contiguous()
        places = torch.searchsorted(wanted, keys).clamp_(max=max(0, len(wanted) - 1))
        if keys.numel() and not (len(wanted) and torch.equal(wanted[places], keys)):
            raise KeyError(table.name)
        padding_place = None if padding is None else _find(padding + base, wanted)
        is_trained = torch.is_grad_enabled() and table.parameter.requires_grad
        lookups = None
        if is_trained and (table.is_sparse or self.is_scaled):
            counted = places if padding_place is None else places[places != padding_place]
            lookups = torch.bincount(counted.reshape(-1), minlength=len(wanted)).int()
        values = self._values.result()[bundle]
        if is_trained:
            self._waits[table.number] += 1
            rows = cast("Tensor", _Rows.apply(table.parameter, values, self, table, lookups))
        else:
            rows = self.take(values, table)
        if len(self._bundles[bundle]) > 1 or not len(wanted):  # rows lie as `take` has put them
            return rows, places, padding_place
        order = self._order(table)
        return rows, order[places], None if padding_place is None else int(order[padding_place])

    def take(self, values: Tensor, table: SplitTable) -> Tensor:
        """The rows of one table, ascending, from those of all that travel with it; of one alone as they came."""
        bundle, _ = self._places[table.number]
        return values if len(self._bundles[bundle]) == 1 else values.index_select(0, self._order(table))

    @property
    def is_complete(self) -> bool:
        """Whether every table of the unit was looked up and has its gradient."""
        return len(self._gradients) == len(self.tables) and not any(self._waits.values())

    def gradient_came(self, table: SplitTable, gradient: Tensor, lookups: Tensor | None) -> None:
        """Note the gradient of the rows of one lookup, and how often that looked each up."""
        if lookups is not None:
            self._lookups[table.number] = self._lookups.get(table.number, 0) + lookups
        before = self._gradients.get(table.number)
        self._gradients[table.number] = gradient if before is None else before + gradient
        self._waits[table.number] -= 1
        self._came(self, table, gradient)

    def push(self, numbers: Sequence[int]) -> Job[dict[int, Pushed]]:
        """Send the gradients of some of the tables to the owners; zeros for one that has none on this rank.

        Args:
            numbers: Of the tables, the same on all ranks.

        Returns:
            What was pushed here, by number of the table.
        """
        chosen = [b for b, tables in enumerate(self._bundles) if any(table.number in numbers for table in tables)]
        told = self._told.result()
        gradients = [self._bundle_gradient(b) for b in chosen]
        lookups = [self._bundle_lookups(b) for b in chosen]

        def work() -> dict[int, Pushed]:
            came = push([told[b] for b in chosen], gradients, lookups, self._way.axis)
            pairs = [
                (self._bundles[b][t], part)
                for b, parts in zip(chosen, came, strict=True)
                for t, part in enumerate(parts)
            ]
            return {table.number: part for table, part in pairs if table.number in numbers}

        return self._way.courier.submit(work)

    def _current_versions(self) -> list[int]:
        return [table.parameter._version for table in self.tables.values()]

    def _order(self, table: SplitTable) -> Tensor:
        """`[rows]` where each row of a table, ascending, comes among those that travel with it."""
        bundle, t = self._places[table.number]
        found = self._wishes[bundle]
        return found.positions[found.distinct.starts[t] : found.distinct.starts[t + 1]]

    def _bundle_gradient(self, bundle: int) -> Tensor:
        tables = self._bundles[bundle]
        found = {table.number: self._gradients.pop(table.number, None) for table in tables}
        only = found[tables[0].number]
        if len(tables) == 1 and only is not None:
            return only.contiguous()
        whole = tables[0].parameter.new_zeros(len(self._wishes[bundle]), tables[0].split.width)
        for table in tables:
            gradient = found[table.number]
            if gradient is not None:
                whole.index_copy_(0, self._order(table).to(whole.device), gradient)
        return whole

    def _bundle_lookups(self, bundle: int) -> Tensor | None:
        """How often rows were looked up, in the order in which they travel, if an owner must know."""
        tables = self._bundles[bundle]
        if not self.is_scaled and not any(table.is_sparse for table in tables):
            return None
        whole = torch.zeros(len(self._wishes[bundle]), dtype=torch.int32, device=self._way.axis.device)
        for table in tables:
            counts = self._lookups.pop(table.number, None)
            if counts is not None:
                whole[self._order(table).to(whole.device)] = counts.to(whole.device)
        return whole


class _Rows(torch.autograd.Function):
    """The values of rows, as a function of the table: their gradient goes to the unit instead."""

    @staticmethod
    def forward(
        ctx: Any, parameter: Tensor, values: Tensor, unit: Unit, table: SplitTable, lookups: Tensor | None
    ) -> Tensor:
        ctx.unit, ctx.table, ctx.lookups = unit, table, lookups
        return unit.take(values.view_as(values), table)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, ...]:
        ctx.unit.gradient_came(ctx.table, gradients[0], ctx.lookups)
        return (None,) * 5


def _find(row: int, rows: Tensor) -> int | None:
    """Where a row lies among ascending ones, if it does."""
    place = int(torch.searchsorted(rows, row))
    return place if place < len(rows) and int(rows[place]) == row else None
