"""`TablePlan`: what was decided for one table, with the numbers that led to it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import zip_longest
from typing import Any

from tulle.cost import Characteristics, Cost
from tulle.entries import Entries
from tulle.sync import AUTO, Choice, check_scheme
from tulle.tables import PLACEMENTS

_SHARES = ("density", "overlap_ratio")
"""Of Zen's four numbers those that are at most 1."""


@dataclass(frozen=True, slots=True)
class TablePlan:
    """What was decided for one table.

    Args:
        name: The parameter's name in the model.
        rows: Rows of the table.
        width: Columns.
        scheme: How its gradient is synchronized: a scheme's name, or `"auto"` to choose by the first gradients; or how
            the table is split, `"rows"` or `"columns"`.
        reason: Why, in one sentence.
        density: Share of rows that one rank touches in a step, 0 to 1; None if it was not measured.
        candidates: Predicted cost by scheme.
        characteristics: Zen's four numbers of its gradients by name, where they were measured.
        measured: What the exchange that it takes part in was seen to take, after the fact.
    """

    name: str
    rows: int
    width: int
    scheme: str
    reason: str = ""
    density: float | None = None
    candidates: Mapping[str, Cost] | None = field(default=None, hash=False)
    characteristics: Mapping[str, float] | None = field(default=None, hash=False)
    measured: Cost | None = None

    def with_choice(self, choice: Choice | None, measured: Cost | None) -> TablePlan:
        """The same with a choice that was made, if any, and what was measured, if anything."""
        if choice is None:
            return replace(self, measured=measured)
        return replace(
            self,
            scheme=choice.scheme,
            reason=choice.reason,
            density=choice.density,
            candidates=dict(choice.candidates),
            characteristics=ratios(choice.characteristics),
            measured=measured,
        )

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        candidates = [{"scheme": name, **asdict(cost)} for name, cost in (self.candidates or {}).items()]
        return asdict(self) | {"candidates": candidates}

    @staticmethod
    def from_json(parsed: Mapping[str, Any], path: str = "the table") -> TablePlan:
        """From plain values, checked.

        Args:
            parsed: Plain values.
            path: Where they stand in a plan.

        Raises:
            PlanError: Naming the entry that is wrong, and where it stands.
        """
        entries = Entries.of(parsed, path, TablePlan)
        measured, ratios_of = parsed.get("measured"), parsed.get("characteristics")
        return TablePlan(
            name=entries.text("name"),
            rows=entries.whole("rows"),
            width=entries.whole("width"),
            scheme=entries.made("scheme", lambda scheme: check_scheme(scheme, extra=(AUTO, *PLACEMENTS))),
            reason=entries.text("reason", default=""),
            density=None if parsed.get("density") is None else entries.number("density", most=1),
            candidates={one.text("scheme"): _cost(one) for one in entries.objects("candidates", Cost, ["scheme"])}
            or None,
            characteristics=_ratios(entries.by_name("characteristics")) if ratios_of is not None else None,
            measured=_cost(Entries.of(measured, entries.at("measured"), Cost)) if measured else None,
        )


def explained(tables: Sequence[TablePlan]) -> list[str]:
    """What was chosen for each table, and why, and what candidates cost: of tables that travel as one, once."""
    lines: list[str] = []
    for table, following in zip_longest(tables, tables[1:]):
        lines.append(f"{table.name} ({table.rows:,} x {table.width:,}): {table.scheme}: {table.reason}")
        if table.characteristics:
            lines.append("  " + ", ".join(f"{name} {value:.4g}" for name, value in table.characteristics.items()))
        if following is None or _costs(following) != _costs(table):
            lines += _costs(table)
    return lines


def _costs(table: TablePlan) -> list[str]:
    lines = [_line(name, cost) for name, cost in (table.candidates or {}).items()]
    return [*lines, _line("measured", table.measured)] if table.measured else lines


def _line(name: str, cost: Cost) -> str:
    return f"  {name:<20} {cost.seconds * 1e3:9.3f} ms {cost.bytes / 1e6:9.3f} MB {cost.messages:4d} messages"


def ratios(looks: Characteristics) -> dict[str, float]:
    """Zen's four numbers of a gradient, by name."""
    return {
        "density": looks.density,
        "overlap_ratio": looks.overlap_ratio,
        "densification_ratio": looks.densification_ratio,
        "skewness_ratio": looks.skewness_ratio,
    }


def _ratios(entries: Entries) -> dict[str, float]:
    return {name: entries.number(name, most=1 if name in _SHARES else math.inf) for name in entries.values}


def _cost(entries: Entries) -> Cost:
    return Cost(entries.whole("bytes"), entries.whole("messages"), entries.number("seconds"))
