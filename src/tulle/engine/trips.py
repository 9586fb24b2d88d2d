"""`Trip`: rows of split tables that are fetched together, and whose gradients are pushed together.

    numbers told   ->   owners serve values   ->   lookups   ->   gradients   ->   pushed to the owners
    (background)        (this thread; background)   (autograd)                      (background)

Values are served as they are when the fetch begins; if a table changes before the lookup, they are fetched anew.
A trip that knows the next one cuts its gradients in two: rows that the next one wants go first, and the others, on a
way of their own, when the next one's values are there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from tulle.comm import BackgroundThread, Job, eager
from tulle.engine.alike import is_bitwise
from tulle.engine.returned import Parcel, Returned
from tulle.engine.split_table import SplitTable
from tulle.errors import CommunicationError, ModelError
from tulle.mesh import Axis
from tulle.parts import local_of, writes_by_data
from tulle.rows import occurrences
from tulle.tables import (
    Division,
    Ids,
    Lookup,
    Pushed,
    Request,
    Route,
    bundles,
    divide,
    fetch,
    refuse,
    request_of,
    tell,
)


@dataclass(frozen=True, slots=True)
class Way:
    """On what the rows of split tables travel: an axis of their own and the thread that does their exchanges."""

    axis: Axis
    background: BackgroundThread


@dataclass(frozen=True, slots=True, eq=False)
class Told:
    """What is known of a trip when it was told: one a bundle.

    Args:
        requests: What this rank wants.
        routes: How it comes.
    """

    requests: Sequence[Request]
    routes: Sequence[Route]


Pushes = Job[dict[int, Pushed]]
"""What is pushed here, by number of the table."""


@dataclass(frozen=True, slots=True)
class Delay:
    """How the gradients of a trip's delayed rows go.

    Args:
        following: The trip that wants the others.
        way: On what they travel.
        divisions: Which rows are prior and which delayed, one a bundle.
        let_pass: What is set when they need not let others pass any more: the values of the following trip, and
            gradients of replicas that the next forward reads.
    """

    following: Trip
    way: Way
    divisions: Job[list[Division]]
    let_pass: list[threading.Event]


class Trip:
    """Rows that are fetched together. Every rank must make the same trips, in one order, with its own ids.

    Args:
        number: Counted alike on all ranks.
        tables: The tables.
        ids: What this rank looks up in each, or more.
        way: On what they travel.
        read: Called with the trip, a table and places of this rank's part: gives the rows that lie there.
        came: Called with the trip, a table and a gradient when that came.
        how: How rows are looked up, if it is one lookup: its `max_norm` and `scale_grad_by_freq` hold.
    """

    def __init__(
        self,
        number: int,
        tables: Sequence[SplitTable],
        ids: Sequence[Tensor],
        way: Way,
        *,
        read: Callable[[Trip, SplitTable, Tensor], Tensor],
        came: Callable[[Trip, SplitTable, Tensor], None],
        how: Lookup | None = None,
    ) -> None:
        self.number = number
        self.tables = {table.number: table for table in tables}
        found = bundles([(table.split, table.parameter.dtype) for table in tables])
        self._bundles = [[tables[t] for t in of_bundle] for of_bundle in found]
        self._places = {table.number: (b, t) for b, some in enumerate(self._bundles) for t, table in enumerate(some)}
        """The bundle of each table, and its place there, by the table's number."""
        for table, given in zip(tables, ids, strict=True):
            table.check_ids(given)
        self._ids = [[Ids.of(ids[t]) for t in of_bundle] for of_bundle in found]
        self._way = way
        self._read = read
        self._came = came
        self._bound = (how.max_norm, how.norm_type) if how is not None and how.max_norm else None
        """The largest norm of a row, and its order, if lookups renormalize."""
        self._is_one_lookup = how is not None
        self.is_scaled = how is not None and how.scale_grad_by_freq

        # What is told:
        self._told: Job[list[Told]] | None = None
        """What is known of all trips that were told with this one."""
        self._place = 0
        """Its own among these."""
        self._known: Told | None = None
        """What is known of this one, once it was waited for."""

        # What is fetched:
        self._values: Job[list[Tensor]] | None = None
        """The rows, one tensor a bundle, as they were when the fetch began."""
        self._versions: list[tuple[int, int, int]] = []
        """Counts of writes and addresses of the tables then: if they are others now, rows are fetched anew."""
        self.is_checked = False
        """Whether rows that were served before their lookup are looked at again then."""
        self._served: Sequence[Sequence[Tensor]] | None = None
        """What was given to each rank, a list a bundle, if it is to be looked at again."""
        self.may_pass = threading.Event()
        """Set when others need not wait for the values of this trip, and of those told with it, any more."""
        self._is_last = True
        """Whether it is the last of those told with it, so that others may pass when its values are here."""

        # What is pushed:
        self._returned = Returned(self._bundles, is_scaled=self.is_scaled)
        self.delay: Delay | None = None
        """How those of delayed rows go, if it is known which these are."""

    def rows(self, table: SplitTable) -> int:
        """How many distinct rows of a table this rank wants; waits until they are known."""
        bundle, t = self._places[table.number]
        starts = self._told_of(bundle).distinct.starts
        return starts[t + 1] - starts[t]

    @property
    def is_refused(self) -> bool:
        """Whether some rank told what is no row of a table; waits until that is known. Who looks it up is told so."""
        try:
            self._answer()
        except (IndexError, TypeError, CommunicationError):
            return True
        return False

    @property
    def gradients_bytes(self) -> int:
        """Of all rows that this rank wants; waits until they are known."""
        return sum(
            len(rows) * tables[0].split.width * tables[0].parameter.dtype.itemsize
            for rows, tables in zip(self._answer().requests, self._bundles, strict=True)
        )

    def requests(self) -> list[Request]:
        """What this rank wants, one a bundle: for whoever tells it.

        Raises:
            IndexError: If a table has no such row.
            TypeError: If ids are no whole numbers.
        """
        found = zip(self._ids, self._bundles, strict=True)
        return [request_of(ids, [table.split for table in tables]) for ids, tables in found]

    def divide(self, following: Trip, later: Way, are_replicas_read: threading.Event) -> None:
        """Find out which rows the next trip wants; gradients of the others go later. Every rank must call it.

        Args:
            following: The next trip, just told.
            later: On what the gradients of the other rows travel.
            are_replicas_read: Set while nobody waits for replicas' gradients, which go before these, too.
        """

        def work() -> list[Division]:
            return divide(self._routes_in_turn(), following._routes_in_turn(), self._way.axis)

        divisions = self._way.background.submit(work)
        # Where threads take turns these would hold up whom they wait for: there all go in the order of submits.
        let_pass = [] if later.background.takes_turns else [following.may_pass, are_replicas_read]
        self.delay = Delay(following, later, divisions, let_pass)

    def begin_fetch(self) -> None:
        """Have the values under way, as they are now, unless these are already. Every rank must call it."""
        if self._values is not None and self._current_versions() == self._versions:
            return
        routes = self._routes()
        if self._bound is not None and routes[0].places.numel():
            [table] = self.tables.values()
            with torch.no_grad():
                torch.embedding_renorm_(local_of(table.parameter), torch.unique(routes[0].places).long(), *self._bound)
        served = self._serve(routes)
        self._versions = self._current_versions()
        self._served = served if self.is_checked else None

        def work() -> list[Tensor]:
            try:
                return fetch(routes, served, self._way.axis)
            finally:
                if self._is_last:
                    self.may_pass.set()

        self._values = self._way.background.submit(work)

    def _serve(self, routes: Sequence[Route]) -> list[Sequence[Tensor]]:
        """The rows that each rank wants of this one, as they are now."""
        return [
            route.serve([partial(self._read, self, table) for table in tables])
            for route, tables in zip(routes, self._bundles, strict=True)
        ]

    def _check_unwritten(self) -> None:
        """Raise if rows that were given to others have been written since in a way that no version counter sees."""
        if self._served is None or self._current_versions() != self._versions:
            return
        for tables, then, now in zip(self._bundles, self._served, self._serve(self._routes()), strict=True):
            if not all(map(is_bitwise, then, now)):
                names = ", ".join(table.name for table in tables)
                raise ModelError(
                    f"rows of {names} were written, by .detach().data say, after they had been fetched for the "
                    "lookups that follow: write into the parameter itself within torch.no_grad(), which is seen"
                )

    def look_up(self, table: SplitTable, ids: Tensor, padding: int | None) -> tuple[Tensor, Tensor, int | None]:
        """Rows of a table, where in them ids lie, and where the padding does, if it is among them.

        The gradient of the rows comes to this trip, if there is to be one.

        Raises:
            KeyError: If an id is not among the rows of this trip.
        """
        self._check_unwritten()
        self.begin_fetch()
        self._served = None
        assert self._values is not None, "begun just now"
        bundle, t = self._places[table.number]
        distinct = self._told_of(bundle).distinct
        wanted = distinct.of_table(t)
        places = distinct.places(t, ids, is_checked=self.is_checked)
        padding_place = None if padding is None else _find(padding + distinct.bases[t], wanted)
        is_trained = torch.is_grad_enabled() and table.parameter.requires_grad
        lookups = None
        if is_trained and (table.is_sparse or self.is_scaled):
            counted = places if padding_place is None else places[places != padding_place]
            lookups = occurrences(counted.reshape(-1), len(wanted)).int()
        values = self._values.result()[bundle]
        self._values = None if self._is_one_lookup else self._values
        if is_trained:
            self._returned.expect(table)
            rows = cast("Tensor", _Rows.apply(table.parameter, values, self, table, lookups))
        else:
            rows = self.take(values, table)
        if len(self._bundles[bundle]) > 1 or not len(wanted):  # rows lie as `take` has put them
            return rows, places, padding_place
        order = self._told_of(bundle).order(t)
        return rows, order.take(places), None if padding_place is None else int(order[padding_place])

    def take(self, values: Tensor, table: SplitTable) -> Tensor:
        """The rows of one table, ascending, from those of all that travel with it; of one alone as they came."""
        bundle, t = self._places[table.number]
        return values if len(self._bundles[bundle]) == 1 else values.index_select(0, self._told_of(bundle).order(t))

    @property
    def is_complete(self) -> bool:
        """Whether every table of the trip was looked up and has its gradient."""
        return self._returned.is_complete

    def gradient_came(self, table: SplitTable, gradient: Tensor, lookups: Tensor | None) -> None:
        """Note the gradient of the rows of one lookup, and how often that looked each up."""
        self._returned.come(table, gradient, lookups)
        self._came(self, table, gradient)

    def push(self, numbers: Sequence[int]) -> tuple[Pushes, Pushes | None]:
        """Send the gradients of some of the tables to the owners; zeros for one that has none on this rank.

        Args:
            numbers: Of the tables, the same on all ranks.

        Returns:
            What was pushed here; if the trip is divided, of prior rows only, and then of delayed ones.
        """
        chosen = [b for b, tables in enumerate(self._bundles) if any(table.number in numbers for table in tables)]
        tables = [[table.number if table.number in numbers else None for table in self._bundles[b]] for b in chosen]
        told = self._answer()
        parcel = Parcel(
            tables,
            [told.routes[b] for b in chosen],
            [self._returned.gradient(b, told.requests[b]) for b in chosen],
            [self._returned.lookups(b, told.requests[b]) for b in chosen],
        )
        if self.delay is None:
            return self._way.background.submit(partial(parcel.push, self._way.axis, "rows")), None
        found, later = self.delay.divisions.result(), self.delay.way
        divisions = [found[b] for b in chosen]
        prior = parcel.cut([one.prior for one in divisions], [one.is_prior for one in divisions])
        delayed = parcel.cut([one.delayed for one in divisions], [~one.is_prior for one in divisions])
        return (
            self._way.background.submit(partial(prior.push, self._way.axis, "prior rows")),
            later.background.submit(partial(delayed.push_after, self.delay.let_pass, later.axis)),
        )

    def _routes(self) -> Sequence[Route]:
        """One a bundle; waits until they are known."""
        return self._answer().routes

    def _routes_in_turn(self) -> Sequence[Route]:
        """The same for a job of the thread that told them; who else wants them has still to wait for its stream."""
        assert self._told is not None, "trips are told as soon as they are made"
        return self._told.result()[self._place].routes

    def _told_of(self, bundle: int) -> Request:
        """What was told of a bundle; waits until it is known."""
        return self._answer().requests[bundle]

    def _answer(self) -> Told:
        if self._known is None:
            assert self._told is not None, "trips are told as soon as they are made"
            self._known = self._told.result()[self._place]
        return self._known

    def _current_versions(self) -> list[tuple[int, int, int]]:
        """What changes where a table is written in, or in a step of an optimizer lies elsewhere from then on."""
        with torch._C.DisableTorchFunctionSubclass():  # asked often
            parameters = [table.parameter for table in self.tables.values()]
            return [(p._version, writes_by_data(p), p.data_ptr()) for p in parameters]


def tell_together(trips: Sequence[Trip]) -> None:
    """Tell the owners the rows of some trips, in one exchange. Every rank must call it, alike.

    Which rows these are is found out by the background thread, beside what this one computes. If they are none of the
    tables', who asks for what was told hears of that; the other ranks do, too.

    Args:
        trips: Just made, in the order in which their values will be fetched, on one way.
    """
    way = trips[0]._way
    told = way.background.submit(partial(_tell, trips, way.axis))
    for place, trip in enumerate(trips):
        trip._told, trip._place = told, place
        trip._is_last, trip.may_pass = trip is trips[-1], trips[-1].may_pass


def _tell(trips: Sequence[Trip], axis: Axis) -> list[Told]:
    try:
        requests = [trip.requests() for trip in trips]
    except (IndexError, TypeError):
        refuse([table.name for trip in trips for table in trip.tables.values()], axis)
        raise
    routes = iter(tell([one for of_trip in requests for one in of_trip], axis))
    return [Told(of_trip, [next(routes) for _ in of_trip]) for of_trip in requests]


class _Rows(torch.autograd.Function):
    """The values of rows, as a function of the table: their gradient goes to the trip instead."""

    @staticmethod
    def forward(
        ctx: Any, parameter: Tensor, values: Tensor, trip: Trip, table: SplitTable, lookups: Tensor | None
    ) -> Tensor:
        ctx.trip, ctx.table, ctx.lookups = trip, table, lookups
        ctx.set_materialize_grads(False)
        return trip.take(values.view_as(values), table)

    @staticmethod
    @eager
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        if gradients[0] is not None:  # else as if the loss left the lookup out
            ctx.trip.gradient_came(ctx.table, gradients[0].detach(), ctx.lookups)
        return (None,) * 5


def _find(row: int, rows: Tensor) -> int | None:
    """Where a row lies among ascending ones, if it does."""
    place = int(torch.searchsorted(rows, row))
    return place if place < len(rows) and int(rows[place]) == row else None
