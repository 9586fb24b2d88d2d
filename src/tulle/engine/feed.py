"""`Feed`: tells the rows of a batch's lookups all at once, as soon as the batch is known; they travel in a few trips.

    its ids found in the batch  ->  told  ->  (optimizer.step)  ->  values fetched  ->  lookups find them there

One feed begins with each call of the model; another, of `tulle.lookahead`, a step earlier.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from tulle.comm import gather_values
from tulle.engine.departures import Departures
from tulle.engine.sources import Sources
from tulle.engine.split_table import SplitTable
from tulle.engine.trips import Trip
from tulle.errors import ModelError
from tulle.mesh import Axis
from tulle.tables import tell_the_end, tell_unlike, uneven

Load = tuple[Sequence[SplitTable], Sequence[Tensor]]
"""Tables that share a trip, and the ids of each."""
IdsOf = Callable[[object], Mapping[str, Tensor]]
"""From a batch to the ids that the model will look up in each table, by its name."""


class Feed:
    """Trips of steps that begin with a batch.

    Args:
        tables: All split tables.
        make: Makes trips, each of some tables and the ids of each, and tells them together.
        say_instead: Tells why there are no trips, which would have been of some tables.
        divide: Called with the trips under way and the next ones, when these are told.
        departures: Which tables share a trip.
        axis: Whose ranks must agree.
        ids_of: Given by the user in place of what would be learned.
    """

    def __init__(
        self,
        tables: Sequence[SplitTable],
        make: Callable[[Sequence[Load]], list[Trip]],
        say_instead: Callable[[Callable[[Sequence[str], Axis], None], Sequence[str]], None],
        divide: Callable[[Sequence[Trip], Sequence[Trip]], None],
        departures: Departures,
        axis: Axis,
        ids_of: IdsOf | None = None,
    ) -> None:
        self._tables = {table.number: table for table in tables if table.is_foreseeable}
        self._make = make
        self._say_instead = say_instead
        self._divide = divide
        self._departures = departures
        self._axis = axis
        self._sources = Sources(axis)
        self._ids_of = ids_of
        self.trips: list[Trip] = []
        """Those of the step that is under way."""
        self.upcoming: list[Trip] = []
        """Those of the next, if they have been told, in the order in which their values are to be fetched."""
        self._lookups: dict[int, int] = {}
        self._agreed: list[int] = []
        """Tables of which the user's function gave ids of the last batch, on all ranks: messages are as long."""
        self.named: set[str] = set()
        """What tables are called of which that may give ids, those of other models too."""

    @property
    def numbers(self) -> dict[str, int]:
        """Of tables whose rows can travel ahead, by the names of their parameters and of their modules."""
        numbers = {table.name: table.number for table in self._tables.values()}
        return numbers | {name.removesuffix(".weight"): number for name, number in numbers.items()}

    def tell(self, batch: object) -> None:
        """Tell the rows of the next step, as far as they are known. Every rank must call it, with its own batch."""
        if self._ids_of is None:
            ids = self._sources.ids(batch)
        else:
            ids = self._given(self._ids_of, batch)
            self._agree([*ids])
        groups = self._departures.groups(number for number in ids if number in self._tables)
        loads = [([self._tables[number] for number in group], [ids[number] for number in group]) for group in groups]
        self.upcoming = self._make(loads) if loads else []
        if self.trips and self.upcoming:
            self._divide(self.trips, self.upcoming)

    def tell_ahead(self, batch: object) -> None:
        """The same of a loop's next batch: if it is of another form than those until now, all ranks' must be."""
        self.tell(batch)
        if not self.upcoming and self._ids_of is None:
            self._say(tell_unlike, self._sources.tables())

    def tell_the_end(self) -> None:
        """Tell that there is no next step. Every rank must call it; if one tells a step instead, all raise."""
        if self._ids_of is None:
            self._say(tell_the_end, self._sources.tables())
        elif self._agreed:
            self._say(tell_the_end, self._agreed)
        else:
            self._agree(None)

    def _agree(self, given: list[int] | None) -> None:
        """See that all ranks' batches have ids of the same tables, or None has a batch. Every rank must call it.

        Where they are those of the batch before, nothing is sent: a rank with others says so in place of its rows.
        """
        if not self._tables or (given and given == self._agreed):
            return
        self._say(tell_unlike, self._agreed)  # returns if all have others
        heard = gather_values(given, self._axis, label="tables of which ids are given")
        for rank, theirs in enumerate(heard):
            if (theirs is None) != (given is None):
                ended, other = (rank, self._axis.rank) if theirs is None else (self._axis.rank, rank)
                raise uneven(ended, other, self._axis)
            if theirs is not None and theirs != heard[0]:
                named = [[self._tables[number].name for number in one or ()] for one in (heard[0], theirs)]
                raise ModelError(
                    f"tulle.lookahead was given ids of {named[0]} on rank 0 of axis {self._axis.name!r}, and of "
                    f"{named[1]} on rank {rank}: give ids of the same tables on all ranks, of which some may be empty"
                )
        self._agreed = given or []

    def _say(self, word: Callable[[Sequence[str], Axis], None], numbers: Sequence[int]) -> None:
        names = [self._tables[number].name for number in numbers if number in self._tables]
        if names:
            self._say_instead(word, names)

    def begin(self, batch: object) -> None:
        """The step of a batch begins, with what was told of it. Every rank must call it."""
        if self._ids_of is None:
            self._sources.watch(batch)
        self._departures.begin()
        self.trips, self.upcoming = self.upcoming, []
        self._lookups.clear()

    def end(self) -> None:
        """Forget the trips of the step, which is over."""
        self._sources.end()
        self.trips = []

    def rest(self) -> None:
        """Another loop begins within this one: what this has told is not looked up until that is over, or ever."""
        self.trips, self.upcoming = [], []

    def drop(self) -> None:
        """Forget those of the next step, too: there will be none."""
        self.end()
        self.upcoming = []

    def find(self, table: SplitTable, ids: Tensor) -> Trip | None:
        """The trip that has the rows of a lookup whose gradient will be wanted, if there is one.

        Raises:
            TypeError: If the ids are no tensor.
        """
        table.check_ids(ids)
        self._sources.note(table.number, ids)
        lookup = self._lookups.get(table.number, 0)
        self._lookups[table.number] = lookup + 1
        if self._ids_of is None and not self._sources.holds(table.number, lookup):
            return None
        return next((trip for trip in self.trips if table.number in trip.tables), None)

    @property
    def mend(self) -> str:
        """What to do if a lookup asks for more than was told."""
        if self._ids_of is not None:
            return "let the ids= of tulle.lookahead give all ids that the model looks up in a table, or none of it"
        return (
            "until now its ids were one part of the batch as it was; for ids that are computed, or another part of "
            "it (`ids[:, :length]` with lengths that grow), loop through tulle.lookahead(batches, ids=...), a function "
            "from the batch to all ids that the model may look up in each table"
        )

    def _given(self, ids_of: IdsOf, batch: object) -> dict[int, Tensor]:
        """What the user says that the step will look up, by number of the table."""
        numbers, given = self.numbers, ids_of(batch)
        if isinstance(given, Tensor) and len(self._tables) == 1:
            given = {table.name: given for table in self._tables.values()}
        names = [table.name for table in self._tables.values()]
        known = f"the tables whose rows can travel ahead are: {', '.join(names) or 'none'}"
        if not isinstance(given, Mapping):
            raise ModelError(
                f"the function that tulle.lookahead was given as ids gave a {type(given).__name__}, expected the "
                f"ids of each table; {known}"
            )
        given = {name: ids for name, ids in given.items() if name in numbers or name not in self.named}
        for name, ids in given.items():
            if name not in numbers:
                raise ModelError(f"tulle.lookahead was given ids of {name!r}, {known}")
            if not isinstance(ids, Tensor):
                raise ModelError(
                    f"tulle.lookahead was given ids of {name!r} as a {type(ids).__name__}, expected one tensor: of "
                    "several lookups, torch.cat of their ids flattened"
                )
        return {numbers[name]: ids for name, ids in sorted(given.items(), key=lambda pair: numbers[pair[0]])}
