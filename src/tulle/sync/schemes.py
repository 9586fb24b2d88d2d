"""The registry of schemes, and the choice among them by cost: ranks that know the same choose the same."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import tulle.sync.allgather as allgather
import tulle.sync.densify as densify
from tulle.comm import Deferred
from tulle.cost import Characteristics, Cost, Network
from tulle.errors import PlanError
from tulle.mesh import Axis
from tulle.rows import RowSparse
from tulle.sync.table import Table

AUTO = "auto"


class Scheme(Protocol):
    """A module with two halves: how it moves the bytes, and what that costs."""

    def all_reduce(
        self,
        gradients: Sequence[RowSparse],
        tables: Sequence[Table],
        counts: Sequence[Sequence[int]],
        axis: Axis,
    ) -> Deferred[list[RowSparse]]:
        """Sum the coalesced gradients of several tables over the axis."""
        ...

    def cost(self, characteristics: Characteristics, network: Network, ranks: int) -> Cost:
        """Bytes, messages and seconds of that on the rank that pays most."""
        ...


SCHEMES: dict[str, Scheme] = {"allgather": allgather, "densify": densify}


@dataclass(frozen=True, slots=True)
class Choice:
    """Which scheme a table gets, at which density, and what each candidate was predicted to cost."""

    scheme: str
    reason: str
    density: float
    candidates: tuple[tuple[str, Cost], ...]


def choose(characteristics: Characteristics, network: Network, ranks: int) -> Choice:
    """The scheme of least predicted seconds for a gradient that looks like this.

    Example:
        >>> few = Characteristics(num_rows=500_000, width=128, value_bytes=4, rows_per_rank=(960, 970, 955, 961))
        >>> choose(few, Network(latency_s=5e-4, bandwidth_bytes_per_s=1.2e8), 4).scheme
        'allgather'
    """
    candidates = tuple((name, scheme.cost(characteristics, network, ranks)) for name, scheme in SCHEMES.items())
    ordered = sorted(candidates, key=lambda candidate: candidate[1].seconds)
    (best, best_cost), *others = ordered
    than = ", ".join(f"{name} {_ms(cost)}" for name, cost in others)
    reason = (
        f"{characteristics.density:.2%} of {characteristics.num_rows:,} rows touched a rank and step, "
        f"{ranks} rank{'s' if ranks > 1 else ''}: {best} predicted at {_ms(best_cost)}, {than}"
    )
    return Choice(best, reason, characteristics.density, candidates)


def check_scheme(name: str, *, extra: Iterable[str] = (AUTO,)) -> str:
    """Return the name if there is such a scheme.

    Raises:
        PlanError: If there is none, with the names that there are.
    """
    known = [*extra, *SCHEMES]
    if name not in known:
        raise PlanError(f"unknown scheme {name!r}, expected one of {', '.join(known)}")
    return name


def _ms(cost: Cost) -> str:
    return f"{cost.seconds * 1e3:.3g} ms"
