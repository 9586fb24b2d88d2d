"""The registry of schemes, and the choice among them by cost: ranks that know the same choose the same."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import tulle.sync.allgather as allgather
import tulle.sync.balanced as balanced
import tulle.sync.block as block
import tulle.sync.contiguous as contiguous
import tulle.sync.densify as densify
import tulle.sync.holders as holders
import tulle.sync.recursive_doubling as recursive_doubling
import tulle.sync.ring as ring
from tulle.cost import Characteristics, Cost, Network, percent
from tulle.errors import PlanError
from tulle.names import was_meant
from tulle.sync.hierarchical import Hierarchical, best_pair
from tulle.sync.protocol import Scheme

AUTO = "auto"
ALIKE = 1.02
"""Predictions within this factor are no reason to prefer one."""
HIERARCHICAL, DENSIFY = "hierarchical", "densify"

FLAT: dict[str, Scheme] = {
    DENSIFY: densify,
    "allgather": allgather,
    "recursive_doubling": recursive_doubling,
    "ring": ring,
    "holders": holders,
    "balanced": balanced,
    "contiguous": contiguous,
    "block": block,
}
"""Schemes that take all ranks alike."""
SCHEMES: dict[str, Scheme] = FLAT | {HIERARCHICAL: Hierarchical(inside=ring, across=balanced)}
"""All schemes by name. `hierarchical:allgather+balanced` is another pair, inside and across, of flat ones."""


def scheme_named(name: str) -> Scheme:
    """The scheme of a name; `hierarchical:X+Y` takes X among the ranks of a host and Y between hosts.

    Raises:
        PlanError: If there is none, with the names that there are.

    Example:
        >>> scheme_named("hierarchical:densify+balanced").across is SCHEMES["balanced"]
        True
    """
    if name in SCHEMES:
        return SCHEMES[name]
    kind, _, pair = name.partition(":")
    inside, _, across = pair.partition("+")
    if kind == HIERARCHICAL and inside in FLAT and across in FLAT:
        return Hierarchical(FLAT[inside], FLAT[across])
    if kind != HIERARCHICAL:
        check_scheme(name, extra=())
    raise PlanError(f"{name!r} names no pair of schemes, expected hierarchical:X+Y with X and Y of {', '.join(FLAT)}")


@dataclass(frozen=True, slots=True)
class Choice:
    """Which scheme a table gets, for which characteristics, and what each candidate was predicted to cost.

    Of tables that travel as one, bytes are a table's share, by rows; messages and seconds are those of all together.

    Args:
        scheme: Its name.
        reason: Why it was chosen, in words.
        characteristics: What the table's gradient looked like.
        candidates: All schemes by name, with the cost of each.
    """

    scheme: str
    reason: str
    characteristics: Characteristics
    candidates: tuple[tuple[str, Cost], ...]

    @property
    def density(self) -> float:
        """Distinct rows that a rank holds as a share of the table's, 0 to 1, at the choice."""
        return self.characteristics.density


def choose(characteristics: Characteristics, network: Network, ranks: int) -> Choice:
    """The scheme of least predicted seconds for a gradient that looks like this. Nothing is sent.

    Args:
        characteristics: What the table's gradient looks like.
        network: What the axis gives, its latency in seconds and its bandwidth in bytes a second.
        ranks: Number of ranks.

    Example:
        >>> few = Characteristics(num_rows=500_000, width=128, value_bytes=4, rows_per_rank=(960, 970, 955, 961))
        >>> choose(few, Network(latency_s=5e-4, bandwidth_bytes_per_s=1.2e8), 4).scheme
        'holders'
    """
    [choice] = choose_together([characteristics], network, ranks)
    return choice


def choose_together(looks: Sequence[Characteristics], network: Network, ranks: int) -> list[Choice]:
    """One scheme for tables that travel as one, for which they cost one latency and the sum of their bytes and work.

    Args:
        looks: What each table's gradient looks like; all of one width and dtype.
        network: What the axis gives.
        ranks: Number of ranks.

    Returns:
        A choice for each table, all of the same scheme.
    """
    together = Characteristics.end_to_end([look.at(ranks) for look in looks])
    costs = _costs(together, network, ranks)
    ordered = sorted(costs, key=lambda name: costs[name].seconds)
    # Of what is alike by prediction, the one that stands first in the registry: the simplest.
    best = next(name for name in costs if costs[name].seconds <= ALIKE * costs[ordered[0]].seconds)
    others = [name for name in ordered if name != best]
    told = [*others[:2], *({DENSIFY} & {*others[2:]})]  # what DDP would do with a dense gradient is always told
    than = ", ".join(f"{name} {_ms(costs[name])}" for name in told)
    company = f" as one with {_count(len(looks) - 1, 'other table')}" if len(looks) > 1 else ""
    held_rows = max(1, sum(together.rows_per_rank))
    choices: list[Choice] = []
    for look in looks:
        reason = (
            f"{percent(look.density)} of {look.num_rows:,} rows touched a rank and step, "
            f"{_count(ranks, 'rank')}{company}: {best} predicted at {_ms(costs[best])}, {than}"
        )
        share = sum(look.at(ranks).rows_per_rank) / held_rows
        shared = tuple((name, replace(cost, bytes=round(share * cost.bytes))) for name, cost in costs.items())
        choices.append(Choice(best, reason, look, shared if len(looks) > 1 else tuple(costs.items())))
    return choices


def check_scheme(name: str, *, extra: Iterable[str] = (AUTO,)) -> str:
    """Return the name if there is such a scheme.

    Raises:
        PlanError: If there is none, with the names that there are.
    """
    known = [*extra, *SCHEMES]
    if name in known:
        return name
    if isinstance(name, str) and name.startswith(f"{HIERARCHICAL}:"):  # whatever a user's mapping holds
        scheme_named(name)
        return name
    raise PlanError(f"unknown scheme {name!r}, expected one of {', '.join(known)}{was_meant(name, known)}")


def compared(looks: Characteristics, network: Network, ranks: int) -> list[str]:
    """Names of the schemes among which is chosen: all that take ranks alike; of pairs inside and across hosts the best.

    Args:
        looks: What the gradient looks like, on so many ranks.
        network: What the axis gives.
        ranks: Number of ranks.
    """
    if not 1 < network.local_ranks < ranks:
        return [*FLAT]
    return [*FLAT, f"{HIERARCHICAL}:{'+'.join(best_pair(FLAT, looks, network, ranks))}"]


def _costs(looks: Characteristics, network: Network, ranks: int) -> dict[str, Cost]:
    """By scheme, what it is predicted to cost."""
    return {name: scheme_named(name).cost(looks, network, ranks) for name in compared(looks, network, ranks)}


def _ms(cost: Cost) -> str:
    return f"{cost.seconds * 1e3:.3g} ms"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
