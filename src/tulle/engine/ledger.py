"""`Ledger`: what is known of one model's tables by now: the scheme of each, what it was chosen by, what it took.

`tulle.engine.tables` writes it while gradients are summed. Who records or tells a run reads it, at any time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from tulle.cost import Characteristics, Cost, Network
from tulle.engine.bundle import Bundle
from tulle.engine.meter import Meter
from tulle.sync import Choice


@dataclass(frozen=True, slots=True)
class Observation:
    """What one table's gradient looked like in one step, and what its exchange was predicted and seen to take."""

    step: int
    table: str
    scheme: str
    characteristics: Characteristics
    weigh: Callable[[], Choice]
    """Gives what schemes were predicted to take; to predict it takes milliseconds, which nobody may ask for."""
    measured: Cost | None

    @property
    def candidates(self) -> tuple[tuple[str, Cost], ...]:
        """Each scheme and its predicted cost, the cheapest first."""
        return self.weigh().candidates


@dataclass(slots=True)
class Ledger:
    """Empty before the first backward, and of a model without tables."""

    network: Network | None = None
    """What the axis gives, by which schemes are chosen."""
    bundles: dict[str, Bundle] = field(default_factory=dict)
    """By table, that which it is in."""
    meters: dict[str, Meter] = field(default_factory=dict)
    """By table, what its exchange sends and takes."""
    rows: dict[str, int] = field(default_factory=dict)
    """By table, distinct rows of this rank's last gradient."""
    _observations: dict[str, Observation] = field(default_factory=dict)
    """The last of each table since somebody took them: nobody need take them."""

    @property
    def choices(self) -> dict[str, Choice]:
        """The choice in force for each table that was not given a scheme and has had a gradient."""
        return {name: choice for name, bundle in self.bundles.items() if (choice := bundle.choice(name))}

    @property
    def measured(self) -> dict[str, Cost]:
        """By table, of the step before: what the rank that sent most sent, and how long its group's exchange took.

        The seconds are a running mean of those of the rank that came last and so waited for nobody. Row numbers that
        were told ahead are not in them.
        """
        return {name: meter.measured for name, meter in self.meters.items() if meter.measured is not None}

    @property
    def schemes(self) -> dict[str, tuple[str, int]]:
        """By table, the scheme in force, and the rows of this rank's last gradient."""
        return {name: (bundle.scheme, self.rows.get(name, 0)) for name, bundle in self.bundles.items()}

    def observe(self, step: int, table: str, seen: Characteristics, weigh: Callable[[], Choice]) -> None:
        """Keep what a table's gradient looked like in a step, and what tells what each scheme would take for it."""
        scheme = self.bundles[table].scheme
        measured = self.meters[table].measured_of(scheme)
        self._observations[table] = Observation(step, table, scheme, seen, weigh, measured)

    def take_observations(self) -> list[Observation]:
        """What was measured since the last call."""
        taken, self._observations = self._observations, {}
        return [*taken.values()]
