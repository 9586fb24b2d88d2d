"""`Departures`: which tables' rows leave on one trip, and which on a later one, behind what the model computes before.

    forward     words             LSTM        output            backward    output        LSTM          words
    one trip    [words + output]->|                                                              [words + output]->
    two         [words]->|[output]->                                        [output]->                  [words]->

Lookups that come one right after the other share a trip, as each costs a latency; where the model works for longer
between two of them than a trip costs, the rows that come later need not be there for the first, and their gradients,
which are there first, need not wait for the last. Which these are is what rank 0 saw in the first steps.

Source: Li et al., *EmbRace* (ICPP'22), horizontal scheduling; Peng et al., *ByteScheduler* (SOSP'19).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from tulle.comm import gather_values, now_s
from tulle.cost import Network
from tulle.mesh import Axis

_STEPS_WATCHED = 2
_LABEL = "which rows leave together"
LEAST_S, LEAST_BYTES = 1e-3, 64 * 1024
"""Less work between lookups, or fewer bytes of rows, are worth no trip on any network: then none is measured."""


@dataclass(frozen=True, slots=True)
class Stop:
    """A table at its first lookup in a step.

    Args:
        table: Its number.
        gap_s: For how long the model had worked since the lookup before.
        rows_bytes: Of the rows that this rank wants of it.
    """

    table: int
    gap_s: float
    rows_bytes: int


class Departures:
    """Watches the lookups of the first steps, then says which tables' rows leave together.

    Args:
        axis: Whose ranks must agree.
        rows_bytes: Gives the bytes of the rows that this rank last wanted of a table.
        network: Gives what the axis gives; called on all ranks or on none.
    """

    def __init__(self, axis: Axis, *, rows_bytes: Callable[[int], int], network: Callable[[], Network]) -> None:
        self._axis = axis
        self._rows_bytes = rows_bytes
        self._network = network
        self._groups: list[list[int]] | None = None
        self._steps = 0
        self._gaps_s: dict[int, float] = {}
        """The least gap before the first lookup of each table, in the order of the last step."""
        self._seen: dict[int, float] = {}
        self._over_s: float | None = None

    def begin(self) -> None:
        """A step begins. Every rank must call it."""
        if self._groups is not None:
            return
        if self._seen:
            self._gaps_s = {table: min(gap_s, self._gaps_s.get(table, gap_s)) for table, gap_s in self._seen.items()}
        if self._steps == _STEPS_WATCHED:
            self._groups = self._agree()
        self._steps += 1
        self._seen, self._over_s = {}, None

    def comes(self, table: int) -> None:
        """Note that the lookup in a table begins, and how long after the one before."""
        if self._groups is None:
            self._seen.setdefault(table, 0.0 if self._over_s is None else now_s() - self._over_s)

    def over(self) -> None:
        """Note that a lookup has its rows."""
        if self._groups is None:
            self._over_s = now_s()

    def groups(self, tables: Iterable[int]) -> list[list[int]]:
        """Some tables by trip, in the order in which forward wants them; those that were not seen come last."""
        left = set(tables)
        found = [sorted(left.intersection(group)) for group in self._groups or ()]
        unseen = left.difference(*found)
        return [group for group in [*found, sorted(unseen)] if group]

    def _agree(self) -> list[list[int]]:
        mine = [Stop(table, gap_s, self._rows_bytes(table)) for table, gap_s in self._gaps_s.items()]
        stops = gather_values(mine, self._axis, label=_LABEL)[0]
        return depart(stops, self._network) if any(_candidates(stops)) else [[stop.table for stop in stops]]


def depart(stops: Sequence[Stop], network: Callable[[], Network]) -> list[list[int]]:
    """Numbers of tables by trip: a trip begins where rows that come later hide for longer than a trip costs.

    Example:
        >>> stops = [Stop(0, 0.0, 900_000), Stop(1, 1e-5, 900_000), Stop(2, 20e-3, 1_800_000)]
        >>> depart(stops, lambda: Network(latency_s=0.5e-3, bandwidth_bytes_per_s=118e6))
        [[0, 1], [2]]
    """
    given = network()
    groups: list[list[int]] = []
    for number, (stop, is_candidate) in enumerate(zip(stops, _candidates(stops), strict=True)):
        travel_s = sum(later.rows_bytes for later in stops[number:]) / given.bandwidth_bytes_per_s
        if not groups or (is_candidate and min(stop.gap_s, travel_s) > given.latency_s):
            groups.append([])
        groups[-1].append(stop.table)
    return groups


def _candidates(stops: Sequence[Stop]) -> list[bool]:
    """Before which of them a trip could begin, on some network."""
    return [
        number > 0 and stop.gap_s >= LEAST_S and sum(later.rows_bytes for later in stops[number:]) >= LEAST_BYTES
        for number, stop in enumerate(stops)
    ]
