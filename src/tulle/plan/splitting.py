"""Which tables to split over the ranks: those that are predicted to take clearly less so than as replicas."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tulle.cost import Characteristics, Network, all_reduce_cost, percent
from tulle.sync import DENSIFY, Choice, choose_together
from tulle.tables import PLACEMENTS

WORTHWHILE = 0.8
"""A split must be predicted to take at most so much of a replica's seconds: it changes what a rank holds."""
NEARLY = 1.1
"""Placements within this factor are no reason to take one that stands later in the registry."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A table that can be kept as a replica, or split.

    Args:
        looks: What its gradient looks like; of a dense one the rows that are looked up.
        placements: How it can be split.
        is_dense: Whether its gradient is dense, so that there is no scheme to be chosen for a replica.
    """

    looks: Characteristics
    placements: tuple[str, ...] = ()
    is_dense: bool = field(default=False, kw_only=True)


def choose_all(tables: Mapping[str, Candidate], network: Network, ranks: int) -> dict[str, Choice]:
    """A scheme or a placement for each table; those of one kind, which travel as one, get the same.

    Args:
        tables: By name.
        network: What the axis gives.
        ranks: Number of ranks.
    """
    groups: dict[object, list[str]] = {}
    for name, table in tables.items():
        kind = table.looks.width, table.looks.value_bytes, table.placements, table.is_dense
        groups.setdefault(kind, []).append(name)
    chosen: dict[str, Choice] = {}
    for names in groups.values():
        group = [tables[name] for name in names]
        chosen |= zip(names, _choose([table.looks for table in group], group[0], network, ranks), strict=True)
    return {name: chosen[name] for name in tables}


def _choose(looks: list[Characteristics], kind: Candidate, network: Network, ranks: int) -> list[Choice]:
    replicas = _dense(looks, network, ranks) if kind.is_dense else choose_together(looks, network, ranks)
    if ranks == 1 or not kind.placements:
        return replicas
    together = Characteristics.end_to_end([look.at(ranks) for look in looks])
    costs = {name: PLACEMENTS[name].cost(together, network, ranks) for name in kind.placements}
    least_s = min(cost.seconds for cost in costs.values())
    best = next(name for name, cost in costs.items() if cost.seconds <= NEARLY * least_s)
    replica_s = dict(replicas[0].candidates)[replicas[0].scheme].seconds
    told = ", ".join(f"{name} {cost.seconds * 1e3:.3g} ms" for name, cost in costs.items())
    is_split = costs[best].seconds <= WORTHWHILE * replica_s
    return [
        Choice(
            best if is_split else one.scheme,
            f"{one.reason}; split by {told}" + ("" if is_split else f", for which {WORTHWHILE:.0%} would do"),
            one.characteristics,
            (*one.candidates, *costs.items()),
        )
        for one in replicas
    ]


def _dense(looks: list[Characteristics], network: Network, ranks: int) -> list[Choice]:
    cost = all_reduce_cost(sum(look.dense_bytes for look in looks), network, ranks)
    return [
        Choice(
            DENSIFY,
            f"{percent(look.density)} of {look.num_rows:,} rows looked up a rank and step: dense gradients take "
            f"{cost.seconds * 1e3:.3g} ms",
            look,
            ((DENSIFY, cost),),
        )
        for look in looks
    ]
