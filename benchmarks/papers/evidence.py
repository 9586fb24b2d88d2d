"""What a reproduction is made of: published numbers with their source, constants with theirs, ours beside them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any


class Known(StrEnum):
    """How a published number came here."""

    READ = "read"
    """In the paper, or in what its authors published beside it."""
    DERIVED = "derived"
    """By arithmetic from numbers that were read."""
    RECALLED = "recalled"
    """From memory of the paper, its text not at hand; agrees with arithmetic where there is any. To be verified."""


class Role(StrEnum):
    """What a published number is to the model."""

    FITTED = "fitted"
    """A constant was chosen so that it comes out."""
    CHECKED = "checked"
    """Nothing was chosen by it: it says how far the model can be trusted."""
    BEYOND = "beyond"
    """What the paper did not do; its number, if any, is what there is to beat."""


@dataclass(frozen=True, slots=True)
class Published:
    """A number of a paper.

    Args:
        value: The number.
        where: Section, table or figure.
        known: How it came here.
        is_bound: Whether the paper gives it as a limit ("more than", "up to").
    """

    value: float
    where: str
    known: Known
    is_bound: bool = False


@dataclass(frozen=True, slots=True)
class Constant:
    """An assumption: a number that the model takes from elsewhere.

    Args:
        name: What it is.
        value: The number, with its unit, as people read it.
        source: Where it comes from; of a fitted one, which published number it was chosen by.
        is_fitted: Whether it was chosen so that a published number comes out.
    """

    name: str
    value: str
    source: str
    is_fitted: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """A published number beside ours.

    Args:
        what: What is compared.
        ours: Our number.
        unit: Of both: "x", "%", "GB", "ms", "GPUs" ...
        paper: The published one; None where the paper has none.
        role: What it is to the model.
    """

    what: str
    ours: float
    unit: str
    paper: Published | None
    role: Role

    @property
    def deviation(self) -> float:
        """`ours / paper - 1`; not a number without a published one."""
        return self.ours / self.paper.value - 1.0 if self.paper else math.nan


@dataclass(frozen=True, slots=True)
class Curve:
    """A line of a plot, or dots where the paper has numbers."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    is_published: bool = False


@dataclass(frozen=True, slots=True)
class Panel:
    """One plot.

    Args:
        name: Of its file.
        title: What it shows.
        across: Label of the horizontal axis.
        up: Label of the vertical axis.
        curves: What is drawn.
        is_logarithmic: Whether the vertical axis is.
        places: What stands at 1, 2, ... of the horizontal axis, if it has names and not numbers.
    """

    name: str
    title: str
    across: str
    up: str
    curves: Sequence[Curve]
    is_logarithmic: bool = False
    places: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Reproduction:
    """All that is said of one paper.

    Args:
        name: Of its files.
        citation: The paper.
        constants: The assumptions.
        rows: Published numbers beside ours.
        panels: Plots.
        remarks: What the numbers say, in sentences that were made from them.
        tables: Further tables: a title, the heads of the columns, the cells.
    """

    name: str
    citation: str
    constants: Sequence[Constant]
    rows: Sequence[Row]
    panels: Sequence[Panel]
    remarks: Sequence[str]
    tables: Sequence[tuple[str, Sequence[str], Sequence[Sequence[str]]]] = field(default=())

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)

    def row(self, what: str) -> Row:
        """The row of a name."""
        return next(row for row in self.rows if row.what == what)


def explain_deviation(row: Row, *, cause: str, tolerance: float = 0.1) -> str:
    """A sentence that says by how much ours differs, and why, if by more than the tolerance.

    Example:
        >>> row = Row("speedup", 2.2, "x", Published(2.0, "table 1", Known.READ), Role.CHECKED)
        >>> explain_deviation(row, cause="the model knows no stragglers")
        'speedup: 2.2 x against 2 x (+10%), within the tolerance of 10%.'
    """
    assert row.paper is not None, "there is something to differ from"
    told = f"{row.what}: {said(row.ours, row.unit)} against {said(row.paper.value, row.unit)} ({row.deviation:+.0%})"
    if abs(row.deviation) <= tolerance + 1e-9:
        return f"{told}, within the tolerance of {tolerance:.0%}."
    return f"{told}. Likely cause: {cause}."


def said(value: float, unit: str) -> str:
    """A number as people read it."""
    if not math.isfinite(value):
        return "none"
    digits = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{digits} {unit}" if unit != "%" else f"{digits}%"
