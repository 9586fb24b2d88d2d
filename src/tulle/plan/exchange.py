"""`Tariff`: what the exchanges of tables cost, by scheme and placement, as the schemes and placements themselves say.

Tables of one width, dtype and scheme travel as one (`tulle.sync`, `tulle.tables`), few rows of all tables as one
packet. What must be told first, row numbers, is known before forward has run: it costs what the same exchange would
whose values took no bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any, TypeVar

from tulle.cost import NOTHING, Characteristics, Cost, Network, all_reduce_cost, work_cost
from tulle.engine.assumed_dense import is_worthwhile
from tulle.errors import PlanError
from tulle.presence import Remembering
from tulle.simulate import law_of, looks
from tulle.sync import AUTO, DENSIFY, FLAT, compared, scheme_named
from tulle.sync.packet import is_in_packets, packet_cost
from tulle.tables import PLACEMENTS
from tulle.workload import Profile, TableProfile

T = TypeVar("T")
HOPELESS = 3.0
"""A scheme that must take so many times what a placement takes is not looked at: on many ranks a look takes long."""
FALLBACK = "balanced"
"""The scheme of replicas where none is worth a look."""
LOOK_WORK, PRICING_WORK = 20, 10
"""What it takes to tell what a table's gradient looks like, and to price an exchange, by lowering a task: measured."""
REPLICA = "replica"
"""What happens to a table whose gradient is dense, as a replica that is sent whole: in the buckets, by no scheme."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """What tables that travel as one cost the rank that pays most.

    Args:
        scheme: A scheme, or of split tables a placement; `"auto"` for rows that travel in packets.
        told: To tell row numbers: beside forward, as soon as the batch is known.
        values: Of a replica the sum over ranks; of a split table one way, from the owners or to them.
    """

    scheme: str
    told: Cost
    values: Cost

    @property
    def is_split(self) -> bool:
        """Whether each rank has a part of the tables."""
        return self.scheme in PLACEMENTS

    @property
    def total(self) -> Cost:
        """What the tables' exchanges of one step cost together."""
        return self.told + self.values + self.values if self.is_split else self.told + self.values

    def is_below(self, other: Exchange) -> bool:
        """Whether it takes no longer in any of its parts."""
        return self.told.seconds <= other.told.seconds and self.values.seconds <= other.values.seconds


@dataclass(slots=True)
class Tariff:
    """What exchanges of a model's tables cost; it remembers what it was asked.

    Args:
        profile: Of the model.
    """

    profile: Profile
    worked: int = field(init=False, default=0)
    """What that took, in tasks that could have been lowered instead."""
    _tables: dict[str, TableProfile] = field(init=False)
    _kept: dict[object, Any] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._tables = {table.name: table for table in self.profile.tables}

    def table(self, name: str) -> TableProfile:
        """A table of the profile.

        Raises:
            PlanError: If it has none of that name.
        """
        if name not in self._tables:
            known = ", ".join(self._tables) or "none"
            raise PlanError(f"the plan has a table {name!r}, the profile's tables are: {known}")
        return self._tables[name]

    def looks(self, name: str, ranks: int, batches: float) -> Characteristics:
        """What a table's gradient looks like if each of some ranks works on some of the measured micro-batches."""
        key = ("looks", name, ranks, batches)
        if key not in self._kept:
            self.worked += LOOK_WORK
        return self._remembered(key, lambda: looks(self.table(name), ranks, batches=batches))

    def updated_bytes(self, name: str, ranks: int, batches: float) -> float:
        """Bytes of the rows that any rank touched."""
        seen = self.looks(name, ranks, batches)
        return self._remembered(("rows", name, ranks, batches), lambda: seen.union_rows * seen.values_bytes)

    def pushed_bytes(self, name: str, ranks: int, batches: float) -> float:
        """Bytes of the rows that the fullest rank touched."""
        seen = self.looks(name, ranks, batches)
        return max(seen.rows_per_rank) * seen.values_bytes

    def exchange(self, names: Sequence[str], scheme: str, network: Network, *, ranks: int, batches: float) -> Exchange:
        """What tables that travel as one cost under a scheme or placement."""
        if ranks == 1:
            return Exchange(scheme, NOTHING, NOTHING)
        key = ("exchange", tuple(names), scheme, network, ranks, batches)
        return self._remembered(key, lambda: self._exchange(names, scheme, network, ranks=ranks, batches=batches))

    def of_part(
        self, exchange: Exchange, names: Sequence[str], network: Network, *, batches: float, part: float
    ) -> Exchange:
        """The exchange of split tables for a part of a rank's samples: as many rounds, for the rows that one rank has.

        Args:
            exchange: For all samples.
            names: The tables.
            network: Of axis `data`.
            batches: Measured micro-batches that each rank works on.
            part: Of them.
        """
        rows, whole = (sum(self._distinct(name, n) for name in names) for n in (part * batches, batches))
        told_s, values_s = min(2 * network.latency_s, exchange.told.seconds), network.latency_s
        return replace(
            exchange,
            told=_shrunk(exchange.told, told_s, rows / max(1.0, whole)),
            values=_shrunk(exchange.values, min(values_s, exchange.values.seconds), rows / max(1.0, whole)),
        )

    def options(
        self, names: Sequence[str], network: Network, *, ranks: int, batches: float, beside: Sequence[str] = ()
    ) -> list[Exchange]:
        """Ways for tables that travel as one: all placements, and of the schemes those that are not worse throughout.

        Where the run-time would send rows in packets, that stands for all schemes.

        Args:
            names: Tables of one width, dtype, kind of gradient and placements.
            network: Of axis `data`.
            ranks: Of axis `data`.
            batches: Measured micro-batches that each works on.
            beside: Other tables of the same ranks, whose rows would be in the same packets.
        """
        key = ("options", tuple(names), network, ranks, batches, tuple(beside))
        return self._remembered(key, lambda: self._options(names, network, ranks, batches, beside))

    def packet(self, names: Sequence[str], network: Network, *, ranks: int, batches: float) -> Exchange | None:
        """The packet in which the run-time would send few rows of some tables; None where they go by their schemes.

        Args:
            names: Tables whose gradients travel by rows, of any widths and dtypes.
            network: Of axis `data`.
            ranks: Of axis `data`.
            batches: Measured micro-batches that each works on.
        """
        key = ("packet", tuple(names), network, ranks, batches)
        return self._remembered(key, lambda: self._packet(names, network, ranks, batches))

    def _options(
        self, names: Sequence[str], network: Network, ranks: int, batches: float, beside: Sequence[str]
    ) -> list[Exchange]:
        first = self.table(names[0])
        if ranks == 1:
            return [Exchange(AUTO if first.is_sparse else REPLICA, NOTHING, NOTHING)]
        placed = [
            self.exchange(names, placement, network, ranks=ranks, batches=batches) for placement in first.placements
        ]
        if not first.is_sparse:
            return [*self._of_dense(names, network, ranks, batches), *placed]
        beside = [name for name in beside if self.table(name).is_sparse]
        packet = self.packet([*names, *beside], network, ranks=ranks, batches=batches)
        if packet is None:
            return [*least(self._schemes(names, network, ranks, batches)), *placed]
        if beside:
            mine, theirs = (self._packet_cost(part, network, ranks, batches).seconds for part in (names, beside))
            packet = replace(packet, values=_shrunk(packet.values, 0.0, mine / (mine + theirs)))
        return [packet, *placed]

    def _of_dense(self, names: Sequence[str], network: Network, ranks: int, batches: float) -> list[Exchange]:
        """Replicas with dense gradients: by rows where the run-time would send them so, else in the buckets."""
        first, together = self.table(names[0]), self._together(names, ranks, batches)
        packet = self.packet(names, network, ranks=ranks, batches=batches)
        ways = [packet] if packet else least(self._schemes(names, network, ranks, batches))
        rows_s = min(one.total.seconds for one in ways)
        # One that has no placements may be read past its lookups, so that all of its rows get gradients.
        is_by_rows = bool(first.placements) and is_worthwhile(rows_s, together, network)
        return ways if is_by_rows else [Exchange(REPLICA, NOTHING, NOTHING)]

    def _packet(self, names: Sequence[str], network: Network, ranks: int, batches: float) -> Exchange | None:
        if ranks == 1 or not all(self.table(name).width for name in names):
            return None
        schemes_s = sum(
            min(one.total.seconds for one in self._schemes(of_kind, network, ranks, batches))
            for of_kind in self._kinds(names)
        )
        cost = self._packet_cost(names, network, ranks, batches)
        return Exchange(AUTO, NOTHING, cost) if is_in_packets(cost.seconds, schemes_s, network) else None

    def _packet_cost(self, names: Sequence[str], network: Network, ranks: int, batches: float) -> Cost:
        looks = [self._together(of_kind, ranks, batches) for of_kind in self._kinds(names)]
        return packet_cost(looks, len(names), network, ranks)

    def _kinds(self, names: Sequence[str]) -> list[list[str]]:
        """Tables whose rows are numbered through in a packet: of one width and dtype."""
        found: dict[object, list[str]] = {}
        for name in names:
            table = self.table(name)
            found.setdefault((table.width, table.value_bytes), []).append(name)
        return [*found.values()]

    def _schemes(self, names: Sequence[str], network: Network, ranks: int, batches: float) -> list[Exchange]:
        """By the schemes that are worth a look."""
        key = ("schemes", tuple(names), network, ranks, batches)
        return self._remembered(key, lambda: self._by_schemes(names, network, ranks, batches))

    def _by_schemes(self, names: Sequence[str], network: Network, ranks: int, batches: float) -> list[Exchange]:
        def of(way: str) -> Exchange:
            return self.exchange(names, way, network, ranks=ranks, batches=batches)

        together = self._together(names, ranks, batches)
        placed_s = [of(placement).total.seconds for placement in self.table(names[0]).placements]
        limit_s = HOPELESS * min(placed_s, default=inf)
        dense_s = all_reduce_cost(together.dense_bytes, network, ranks).seconds
        sparse_s = least_s(together, network)
        worth = [scheme for scheme in FLAT if (dense_s if scheme == DENSIFY else sparse_s) <= limit_s]
        if worth and 1 < network.local_ranks < ranks:
            worth = compared(together, network, ranks)
        return [of(scheme) for scheme in worth or [FALLBACK]]

    def _exchange(self, names: Sequence[str], scheme: str, network: Network, *, ranks: int, batches: float) -> Exchange:
        together = self._together(names, ranks, batches)
        self.worked += PRICING_WORK
        way = PLACEMENTS[scheme] if scheme in PLACEMENTS else scheme_named(scheme)
        whole = way.cost(together, network, ranks)
        if scheme in PLACEMENTS:
            whole = whole + self._gathered(names, network, batches)
        numbers = way.cost(replace(together, value_bytes=0), network, ranks)
        # Exchanges of row numbers and of values have as many rounds.
        told = Cost(numbers.bytes, numbers.messages // 2, min(numbers.seconds / 2, whole.seconds))
        ways = 2 if scheme in PLACEMENTS else 1
        values_s = (whole.seconds - told.seconds) / ways
        values = Cost((whole.bytes - told.bytes) // ways, (whole.messages - told.messages) // ways, values_s)
        return Exchange(scheme, told, values)

    def _gathered(self, names: Sequence[str], network: Network, batches: float) -> Cost:
        """What a rank takes to add up gradients of rows that it looked up several times, before they go to the owners.

        A gradient that is dense as the model is written was added up when the profile was taken.
        """
        tables = [self.table(name) for name in names]
        looked_up = [(table, batches * table.tokens) for table in tables if table.is_sparse]
        summed_bytes = sum(tokens * table.width * table.value_bytes for table, tokens in looked_up)
        return work_cost(network, summed_bytes=summed_bytes, numbers=sum(tokens for _, tokens in looked_up))

    def _together(self, names: Sequence[str], ranks: int, batches: float) -> Characteristics:
        key = ("together", tuple(names), ranks, batches)
        return self._remembered(key, lambda: self._end_to_end(names, ranks, batches))

    def _end_to_end(self, names: Sequence[str], ranks: int, batches: float) -> Characteristics:
        found = Characteristics.end_to_end([self.looks(name, ranks, batches) for name in names])
        return replace(found, presence=Remembering.like(found.spread))

    def _distinct(self, name: str, batches: float) -> float:
        """Rows that a rank is expected to look up in some of the measured micro-batches."""
        table = self.table(name)
        return self._remembered(("distinct", name, batches), lambda: law_of(table).distinct(batches))

    def _remembered(self, key: object, make: Callable[[], T]) -> T:
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]


def bundles(tables: Iterable[TableProfile], stage_of: Callable[[TableProfile], int]) -> list[tuple[str, ...]]:
    """Names of the tables that can travel as one: those of one stage, width, dtype, kind of gradient and placements."""
    found: dict[object, list[str]] = {}
    for table in tables:
        kind = stage_of(table), table.width, table.value_bytes, table.is_sparse, table.placements
        found.setdefault(kind, []).append(table.name)
    return [tuple(names) for names in found.values()]


def _shrunk(cost: Cost, latency_s: float, share: float) -> Cost:
    """A cost for a share of the bytes, and as many rounds."""
    return Cost(round(cost.bytes * share), cost.messages, latency_s + (cost.seconds - latency_s) * share)


def least(exchanges: Sequence[Exchange]) -> list[Exchange]:
    """Those that no other one is below; of those that are alike the first."""
    return [
        one
        for number, one in enumerate(exchanges)
        if not any(
            other.is_below(one) and (place < number or not one.is_below(other))
            for place, other in enumerate(exchanges)
            if place != number
        )
    ]


def least_s(looks: Characteristics, network: Network) -> float:
    """What a sparse exchange cannot take less than: every rank must receive the rows of the sum that it lacks."""
    links = [one for one in (network, network.across) if one is not None]
    received_rows = max(0, looks.union_rows - max(looks.rows_per_rank))
    return received_rows * looks.values_bytes / max(link.bandwidth_bytes_per_s for link in links)
