"""`SplitTables`: the run-time of the tables of one model that are split over the ranks.

    forward      a lookup fetches its distinct rows from their owners            (a trip: `tulle.engine.trips`)
    backward     last trip first, as soon as its gradients are there: pushed to the owners, beside the rest
    its end      which gradients came on any rank is agreed, what was not pushed is; owners' gradients are set

With lookahead and late updates a trip's gradients go in two parts, of which the first is waited for
(`tulle.engine.late_tables`).

A loss may leave a lookup out on one rank and not on another, so no rank knows by itself what will be pushed. Trips that
were looked up since the last backward are pushed in descending order as long as each is complete; the agreement, on a
process group of its own beside those pushes, says what follows.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from tulle.comm import BackgroundThread, Job, all_gather, all_gather_parts, beside, gather_values, lane, traffic
from tulle.cost import Network, exchange_cost
from tulle.engine.departures import Departures
from tulle.engine.feed import Feed, IdsOf, Load
from tulle.engine.late_tables import Kind, LateTable, MeanRows
from tulle.engine.late_updates import LateUpdates
from tulle.engine.split_table import SplitTable
from tulle.engine.trips import Pushes, Trip, Way, tell_together
from tulle.errors import CommunicationError, GradientError, ModelError
from tulle.mesh import Axis
from tulle.tables import Lookup, ShardGradient, gradient_of_table, placement_of, tell_of_gradients

_AGREED_AT_ONCE = 63
_LABEL = "gradients of split tables"
_KEPT = 256
"""So many trips are kept for other ranks' gradients where this rank's graph is gone."""
_BITS_IF_CHECKED = 2
"""In the numbers of trips whose rows are looked at once more before they are used, and of backwards before which ranks
tell that they have made all lookups: many at first, ever fewer later."""
WORTH_S = 0.04
"""What gradients of the rows of a step must take, at least, for some of them to go later: to divide them costs, too."""


def delays_rows(gradients_bytes: float, network: Network) -> bool:
    """Whether some rows of a step's gradients go later, where they may, by the bytes of the fullest rank's."""
    return exchange_cost(gradients_bytes, 0, network).seconds >= WORTH_S


class SplitTables:
    """The split tables of one model.

    Args:
        tables: The tables.
        axis: Whose ranks hold them.
        came: Called with a table's name and a gradient when it comes; it sees to it that `end_backward` is called.
        step: Gives the number of the step that is under way in forward, of which errors are to speak.
        network: Gives what the axis gives; it is called on all ranks or on none.
    """

    def __init__(
        self,
        tables: Sequence[SplitTable],
        axis: Axis,
        *,
        came: Callable[[str, Tensor], None],
        step: Callable[[], int],
        network: Callable[[], Network],
    ) -> None:
        self.tables = {table.name: table for table in tables}
        self._by_parameter = {id(table.parameter): table for table in tables}
        self._axis = axis
        self._report, self._step, self._network = came, step, network
        self._way = Way(lane(axis, "split tables"), BackgroundThread("tulle split tables", axis.device))
        # A rank that evaluates alone waits in vain; on the others' way its messages would be taken for theirs.
        evaluating = lane(axis, "lookups without gradients")
        self._evaluating = Way(evaluating, BackgroundThread("tulle evaluation", axis.device))
        self._agreement = lane(axis, "agreement on split tables")
        self._later: Way | None = None
        self._late: LateUpdates | None = None
        self._delays_rows: bool | None = None
        """Whether it pays to let rows come later; None as long as none were told ahead."""
        self._late_tables: dict[int, LateTable] = {}
        """The last late gradient of each table."""
        self._trips, self._rows = 0, dict[int, int]()
        self._alive: WeakValueDictionary[int, Trip] = WeakValueDictionary()
        self._expected: list[int] = []
        """Trips whose gradients should come in the next backward, ascending."""
        self._kept: deque[Trip] = deque(maxlen=_KEPT)
        """The last of them: a loss may leave one out, so that no graph holds it here, and another rank's not."""
        self._came: set[tuple[int, int]] = set()
        """Numbers of trip and table of each gradient that came in this backward."""
        self._pushes: list[tuple[Trip, tuple[Pushes, Pushes | None]]] = []
        self._backwards = 1
        self._told_alike: Job[None] | None = None
        self._departures = Departures(axis, rows_bytes=self._rows_bytes, network=network)
        self._calls = self.feed()
        """Begins with each call of the model."""
        self._learned = self.feed()
        """Begins a step earlier: `tulle.lookahead` without ids; what one loop has learned the next one knows."""
        self._loops: list[Feed] = []
        """Those of the loops under way, the innermost last."""
        self._forwards = 0
        """Under way, of the model or of modules of its."""

    @property
    def is_forward(self) -> bool:
        """Whether the model's own code is running, to which tables have the shape of the whole."""
        return self._forwards > 0

    @contextmanager
    def forward(self) -> Iterator[None]:
        """While the model's own code is running within, of the model or of a module of its."""
        self._forwards += 1
        try:
            yield
        finally:
            self._forwards -= 1

    def look_up(self, how: Lookup, ids: Tensor) -> tuple[Tensor, Tensor, int | None]:
        """Rows, where in them the ids lie, and where the padding does. Every rank must call it, with its own ids."""
        table = self.table_of(how)
        if torch.is_grad_enabled():
            traffic.step = self._step()
        self._departures.comes(table.number)
        told = None if how.goes_alone else self._told(table, ids)
        trip = told or self._trips_of([([table], [ids])], how)[0]
        if torch.is_grad_enabled() and table.parameter.requires_grad:
            self._expect([trip] if told is None else (self._ahead or self._calls).trips)
        try:
            found = trip.look_up(table, ids, how.padding_idx)
            self._rows[table.number] = trip.rows(table)
            return found
        except KeyError:
            raise ModelError(
                f"a lookup in {table.name!r} on rank {self._axis.rank} asks for rows that were not told ahead: "
                + (self._ahead or self._calls).mend
            ) from None
        except CommunicationError as error:
            if torch.is_grad_enabled():
                raise
            raise CommunicationError(
                f"{error}. This was a lookup without gradients: of a split table every rank must look up, alike, in "
                "evaluation too"
            ) from error
        finally:
            self._departures.over()

    def update_late(self, late: LateUpdates) -> None:
        """Let rows' gradients, of which the updates wait in `late`, come later if it pays. Every rank must call it."""
        self._late = late
        self._later = Way(lane(self._axis, "delayed rows"), BackgroundThread("tulle delayed rows", self._axis.device))

    def placements(self) -> dict[str, tuple[str, int]]:
        """How each table is split, and how many distinct rows this rank's last lookups were told to have, by name."""
        return {
            name: (placement_of(table.split), self._rows.get(table.number, 0)) for name, table in self.tables.items()
        }

    def feed(self, ids_of: IdsOf | None = None) -> Feed:
        """Something that tells rows of steps ahead."""
        tables = [*self.tables.values()]
        return Feed(tables, self._trips_of, self._say_instead, self._divide, self._departures, self._axis, ids_of)

    @property
    def _ahead(self) -> Feed | None:
        """That of the innermost loop, if there is one."""
        return self._loops[-1] if self._loops else None

    def begin_lookahead(self, ids_of: IdsOf | None) -> Feed:
        """A loop begins that tells the rows of each step a step earlier than the calls of the model."""
        if self._ahead is not None:
            self._ahead.rest()
        is_free = ids_of is None and self._learned not in self._loops
        self._loops.append(self._learned if is_free else self.feed(ids_of))
        return self._loops[-1]

    def end_lookahead(self, feed: Feed) -> None:
        """The loop of a feed is over."""
        feed.drop()
        self._loops.remove(feed)

    def begin_call(self, arguments: object) -> None:
        """The model is called for training: tell the rows of its lookups, as far as they are known, and fetch them."""
        traffic.step = self._step()
        if self._ahead is None:
            self._calls.tell(arguments)
            for trip in self._calls.upcoming:
                trip.begin_fetch()
            self._calls.begin(arguments)

    def end_call(self) -> None:
        """The call is over."""
        self._calls.end()

    def after_step(self) -> None:
        """The optimizers have stepped: fetch what the next step looks up. Every rank must call it."""
        for trip in self._ahead.upcoming if self._ahead is not None else ():
            trip.begin_fetch()

    def wait(self) -> None:
        """Return when no exchange is under way: for those who time them."""
        self._way.background.submit(lambda: None).result()

    def table_of(self, how: Lookup) -> SplitTable:
        """The table of a lookup."""
        found = self._by_parameter.get(id(how.table))
        if found is None:
            raise ModelError(
                f"a lookup is to read a tensor of shape {list(how.table.shape)} that was put in the place of a "
                "split table: torch.func.functional_call and the like cannot, as rows lie on all ranks; write into the "
                "parameter, with p.copy_(...) within torch.no_grad(), or keep the table whole in the plan"
            )
        return found

    def _told(self, table: SplitTable, ids: Tensor) -> Trip | None:
        if not torch.is_grad_enabled() or not table.is_foreseeable:
            return None
        return (self._ahead or self._calls).find(table, ids)

    def _trips_of(self, loads: Sequence[Load], how: Lookup | None = None) -> list[Trip]:
        """Trips, each of some tables and the ids of each, told together. Every rank must call it, with its own ids."""
        way = self._way_now()
        first, self._trips = self._trips + 1, self._trips + len(loads)
        made = [
            Trip(number, tables, ids, way, read=self._read, came=self._gradient_came, how=how)
            for number, (tables, ids) in enumerate(loads, start=first)
        ]
        for trip in made:
            self._alive[trip.number] = trip
            trip.is_checked = self._late is None and trip.number.bit_count() <= _BITS_IF_CHECKED
        tell_together(made)
        return made

    def _say_instead(self, word: Callable[[Sequence[str], Axis], None], names: Sequence[str]) -> None:
        """Tell the others why there are no trips of these tables."""
        way = self._way_now()
        way.background.submit(partial(word, names, way.axis)).result()

    def _way_now(self) -> Way:
        """On what lookups travel that are made here and now."""
        return self._way if torch.is_grad_enabled() else self._evaluating

    def _rows_bytes(self, number: int) -> int:
        """Of the rows that this rank last wanted of a table."""
        table = next(table for table in self.tables.values() if table.number == number)
        return self._rows.get(number, 0) * table.split.width * table.parameter.dtype.itemsize

    def _divide(self, trips: Sequence[Trip], following: Sequence[Trip]) -> None:
        """Of each trip of which the next step has the like, find out which rows that wants."""
        if not (self._late and self._later) or self._delays_rows is False or any(trip.is_refused for trip in trips):
            return
        if self._delays_rows is None:
            heard = gather_values(sum(trip.gradients_bytes for trip in trips), self._axis, label=_LABEL)
            self._delays_rows = delays_rows(max(heard), self._network())
        for trip, after in zip(trips, following, strict=False):
            if self._delays_rows and trip.tables.keys() == after.tables.keys():
                trip.divide(after, self._later, self._late.are_replicas_read)

    def _read(self, trip: Trip, table: SplitTable, places: Tensor) -> Tensor:
        """Rows of this rank's part, for a trip."""
        late = self._late_tables.get(table.number)
        if self._late is not None and late is not None and late.following is trip:
            return self._late.ahead(late, places)
        return table.parameter.detach().as_subclass(Tensor).index_select(0, places)

    def check_ended(self) -> None:
        """Raise if gradients of a backward before are on the way still, to be added to those of the one that begins.

        Raises:
            GradientError: That it has failed.
        """
        if self._came:
            raise GradientError(
                f"a backward has failed after gradients of {', '.join(self.tables)[:80]} had gone to their owners, "
                "which would add them to those of this one: start anew from a checkpoint after a backward that failed"
            )

    def check_alike(self) -> None:
        """All gradients are there: see, now and then, that all ranks have looked up alike. Every rank must call it.

        Before what ranks exchange else at the end of a backward, to which those that still look up do not come.

        Raises:
            ModelError: If this rank has left out a lookup that another makes.
        """
        self._tell_alike()
        if self._told_alike is not None:
            self._told_alike.result()

    def end_backward(self) -> None:
        """Push what was not, wait for what the next step needs, and set the gradients of what this rank owns."""
        self.check_alike()
        for number, tables in self._remaining(self._agree()):
            trip = self._alive.get(number)
            if trip is None:
                raise ModelError(
                    f"rank {self._axis.rank} has left out a lookup, or let go of its graph, in "
                    f"{', '.join(self.tables)[:80]} for which another rank has a gradient: let all ranks look up "
                    "alike (no ids will do), and keep, or drop, their losses alike"
                )
            self._push(trip, tables)
        self._backwards, self._told_alike = self._backwards + 1, None
        pushes, self._pushes = self._pushes, []
        for of_backward in (self._came, self._expected, self._kept):
            of_backward.clear()
        came = Counter(number for _, (first, _) in pushes for number in first.result())
        for trip, (first, later) in pushes:
            for number, pushed in first.result().items():
                table = trip.tables[number]
                rows = MeanRows.of(pushed, Kind.of(table), self._axis, is_scaled=trip.is_scaled)
                late = LateTable(table, rows, later, trip.delay, self._axis) if later and trip.delay else None
                if late is None:
                    _accumulate(table, rows)
                elif came[number] == 1 and table.parameter.grad is None:
                    self._postpone(late)
                else:
                    _accumulate(table, late.whole())
        for table in self.tables.values():
            gradient = table.parameter.grad
            if gradient is not None and not isinstance(gradient, ShardGradient):
                table.parameter.grad = gradient_of_table(gradient, table.split, self._axis)

    def _postpone(self, late: LateTable) -> None:
        """Of a table's gradient, wait for the delayed rows when somebody looks."""
        assert self._late is not None, "only then are trips divided"
        [(parameter, gradient)] = late.gradients
        parameter.grad = gradient
        self._late.replace(self._late_tables.get(late.table.number), late)
        self._late_tables[late.table.number] = late

    def _expect(self, trips: Sequence[Trip]) -> None:
        """Also what was told with a lookup: where this rank leaves it out, another may push it before the others."""
        for trip in trips:
            place = bisect_left(self._expected, trip.number)  # there may be many, of forwards without a backward
            is_new = self._expected[place : place + 1] != [trip.number]
            if is_new and any(table.parameter.requires_grad for table in trip.tables.values()):
                self._expected.insert(place, trip.number)
                self._kept.append(trip)

    def _gradient_came(self, trip: Trip, table: SplitTable, gradient: Tensor) -> None:
        self._report(table.name, gradient)
        self._came.add((trip.number, table.number))
        while self._expected:
            last = self._alive.get(self._expected[-1])
            if last is None or not last.is_complete:
                return
            self._expected.pop()
            self._push(last, sorted(last.tables))

    def _push(self, trip: Trip, tables: Sequence[int]) -> None:
        self._tell_alike()
        self._pushes.append((trip, trip.push(tables)))

    def _tell_alike(self) -> None:
        """Once in a backward, before the first is pushed: that this rank looks up no more."""
        if self._told_alike is None and self._backwards.bit_count() <= _BITS_IF_CHECKED:
            self._told_alike = self._way.background.submit(partial(tell_of_gradients, self._way.axis))

    def _agree(self) -> set[tuple[int, int]]:
        """The gradients that came on any rank, by trip and table. Every rank must call it."""
        tables = len(self._by_parameter)
        keys = sorted(trip * tables + table for trip, table in self._came)
        with beside(self._agreement):  # numbers of the host: it waits for the other ranks, not for what a GPU computes
            return {divmod(key, tables) for key in self._all_of(keys)}

    def _all_of(self, keys: Sequence[int]) -> set[int]:
        """Those of all ranks."""
        device = self._agreement.device
        head = torch.zeros(1 + _AGREED_AT_ONCE, dtype=torch.long)
        head[0] = len(keys)
        head[1 : 1 + len(keys)] = torch.tensor(keys[:_AGREED_AT_ONCE], dtype=torch.long)
        heard = all_gather(head.to(device, non_blocking=True), self._agreement, label=_LABEL).wait().tolist()
        lengths = [max(0, count - _AGREED_AT_ONCE) for count, *_ in heard]
        together = {key for count, *some in heard for key in some[:count]}
        if any(lengths):
            rest = torch.tensor(keys[_AGREED_AT_ONCE:], dtype=torch.long, device=device)
            together |= {*all_gather_parts(rest, lengths, self._agreement, label=_LABEL).wait().tolist()}
        return together

    def _remaining(self, together: set[tuple[int, int]]) -> Iterator[tuple[int, list[int]]]:
        """What is still to be pushed, in the one order: trips descending, tables ascending."""
        done = {trip.number for trip, _ in self._pushes}
        for trip in sorted({trip for trip, _ in together} - done, reverse=True):
            yield trip, sorted(table for other, table in together if other == trip)


def _accumulate(table: SplitTable, rows: MeanRows) -> None:
    """Add to the parameter's gradient."""
    before = table.parameter.grad
    if before is not None and not table.is_sparse:
        before.detach().as_subclass(Tensor).index_add_(0, rows.places, rows.values)
        return
    gradient = rows.to_gradient(table.split.local_shape[0], is_sparse=table.is_sparse)
    table.parameter.grad = gradient if before is None else before + gradient
