"""The section on sparsity: what the tables' gradients look like, by Zen's four characteristics, and what they cost."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from markupsafe import Markup

import tulle.report.quantity as quantity
from tulle.report.characteristics import ObservedTable
from tulle.report.chart import SERIES, Bars, Curve, Frame, Square, draw_bars, draw_curves, draw_squares
from tulle.report.panels import Key, Panel, traffic_colours
from tulle.report.records import FloatArray, Run
from tulle.report.series import Thinned, thin

TABLES_DRAWN = 6
POINTS = 120
CELLS = 16
LOGARITHMIC_FROM = 30.0
TITLE_CHARACTERS = 22


@dataclass(frozen=True, slots=True)
class TableRow:
    """One table's characteristics, in words."""

    name: str
    shape: str
    density: str
    range: str
    overlap: str
    densification: str
    skewness: str
    scheme: str


@dataclass(frozen=True, slots=True)
class Sparsity:
    """The section: charts of the tables that matter most, and all tables in numbers."""

    panels: tuple[Panel, ...]
    rows: tuple[TableRow, ...]
    caption: str


def sparsity(run: Run, tables: Sequence[ObservedTable]) -> Sparsity | None:
    """Return the section on what was observed of the run's tables, None if nothing was."""
    if not tables:
        return None
    drawn = tables[:TABLES_DRAWN]
    colours = _colours(run, drawn)
    legend = tuple(Key(colours[table.name], table.name) for table in drawn)
    panels = [_density_panel(drawn, colours, legend)]
    several = [table for table in drawn if table.ranks > 1]
    if several:
        panels += [
            _overlap_panel(several),
            _skewness_panel(several, colours, legend),
            _densification_panel(several, colours, legend),
        ]
    return Sparsity(tuple(panels), tuple(map(_row, tables)), _caption(tables, drawn))


def _row(table: ObservedTable) -> TableRow:
    looks, alone = table.characteristics, table.ranks == 1
    return TableRow(
        name=table.name,
        shape=f"{quantity.count(table.rows)} × {quantity.count(table.width)}",
        density=quantity.share(looks.density),
        range=f"{quantity.share(table.lowest_density)} to {quantity.share(table.highest_density)}",
        overlap=quantity.MISSING if alone else quantity.share(looks.overlap_ratio),
        densification=quantity.MISSING if alone else quantity.ratio(looks.densification_ratio),
        skewness=quantity.MISSING if alone else quantity.ratio(looks.skewness_ratio),
        scheme=table.scheme,
    )


def _caption(tables: Sequence[ObservedTable], drawn: Sequence[ObservedTable]) -> str:
    ranks = max(table.ranks for table in tables)
    looked = quantity.plural(max(table.observations for table in tables), "step")
    words = [f"As observed in {looked} on {quantity.plural(ranks, 'rank')}."]
    if ranks == 1:
        words.append(
            "With one process there is no other rank to overlap with: start more with tulle run --processes 4 "
            "to see overlap, densification and skewness."
        )
    if len(drawn) < len(tables):
        words.append(
            f"Drawn are the {len(drawn)} of {len(tables)} tables whose touched rows hold the most bytes; "
            "all are in the table below."
        )
    return " ".join(words)


def _colours(run: Run, tables: Sequence[ObservedTable]) -> dict[str, str]:
    """Give each table the colour of its bytes in the charts of traffic, or, if that is grey or taken, a free one."""
    of_traffic = traffic_colours(run)
    colours: dict[str, str] = {}
    for table in tables:
        colour = of_traffic.get((table.name, table.scheme), "grey")
        if colour != "grey" and colour not in colours.values():
            colours[table.name] = colour
    for table in tables:
        if table.name not in colours:
            colours[table.name] = next(one for one in SERIES if one != "grey" and one not in colours.values())
    return colours


def _density_panel(tables: Sequence[ObservedTable], colours: dict[str, str], legend: tuple[Key, ...]) -> Panel:
    medians = [float(np.median(table.density)) for table in tables]
    lowest = min(float(table.density.min()) for table in tables)
    apart = lowest > 0 and max(medians) > LOGARITHMIC_FROM * min(medians)
    curves = [Curve(thin(table.steps, 100 * table.density, points=POINTS), colours[table.name]) for table in tables]
    unit = "% of a table's rows" + (", logarithmic" if apart else "")
    frame = Frame("density", "Density over the steps", unit, is_logarithmic=apart)
    caption = "Density: the share of a table's rows that one rank touches in a step, mean over the ranks."
    if any(curve.thinned.is_binned for curve in curves):
        caption += " Faint: the range of the steps."
    return Panel("Density over the steps", draw_curves(frame, curves), legend, caption)


def _overlap_panel(tables: Sequence[ObservedTable]) -> Panel:
    title = "Overlap between ranks"
    matrices = [(table, table.overlap) for table in tables if table.overlap is not None]
    if not matrices:
        return Panel(title, missing=Markup("With so many ranks only the mean over all pairs is recorded: see below."))
    squares = [Square(_short(table.name), _cells(overlap), table.ranks) for table, overlap in matrices]
    frame = Frame("overlap", "Overlap of each two ranks, by table", "%")
    caption = (
        "Overlap of two ranks, in %: of the rows that the one with fewer touches, the share that the other touches too."
    )
    if len(matrices[0][1]) > CELLS:
        caption += " Along both sides: the ranks; a cell is the mean of several."
    else:
        caption += " Along both sides: the ranks."
    return Panel(title, draw_squares(frame, squares), (), caption)


def _cells(overlap: FloatArray) -> FloatArray:
    """Blank the diagonal, which is always 1, and take the mean of blocks where there would be too many cells."""
    cells = overlap.copy()
    np.fill_diagonal(cells, math.nan)
    ranks = len(cells)
    if ranks <= CELLS:
        return cells
    edges = np.linspace(0, ranks, CELLS + 1).astype(np.int64)
    rows = [cells[top:bottom] for top, bottom in pairwise(edges)]
    return np.array([[_mean(row[:, left:right]) for left, right in pairwise(edges)] for row in rows])


def _mean(cells: FloatArray) -> float:
    known = cells[np.isfinite(cells)]
    return float(known.mean()) if len(known) else math.nan


def _skewness_panel(tables: Sequence[ObservedTable], colours: dict[str, str], legend: tuple[Key, ...]) -> Panel:
    title, ranks = "Skew over contiguous parts", max(table.ranks for table in tables)
    alike = [table for table in tables if table.ranks == ranks]
    series = [Bars(100 * table.parts, colours[table.name]) for table in alike]
    frame = Frame(
        "skewness",
        f"Share of the touched rows in each of {ranks} parts",
        "% of the touched rows",
        across="part of the table",
    )
    worst = max(alike, key=lambda table: table.characteristics.skewness_ratio)
    fullest = int(worst.parts.argmax())
    caption = (
        f"Each table cut into {ranks} contiguous parts of equal size; dashed: an even cut. Part {fullest + 1} of "
        f"{worst.name} holds {quantity.share(float(worst.parts[fullest]))} of the touched rows: skewness "
        f"{quantity.ratio(worst.characteristics.skewness_ratio)}, where 1 is even and {ranks} the worst."
    )
    guide = Key("muted", "even", "guide")
    return Panel(title, draw_bars(frame, series, 100 / ranks), (*legend, guide), caption)


def _densification_panel(tables: Sequence[ObservedTable], colours: dict[str, str], legend: tuple[Key, ...]) -> Panel:
    title, ranks = "Densification over the number of ranks", max(table.ranks for table in tables)
    curves = [Curve(_over_ranks(np.arange(1, ranks + 1, dtype=np.float64)), "muted", "guide")]
    for table in tables:
        curves.append(Curve(_over_ranks(table.densification), colours[table.name]))
        if table.ranks <= CELLS:
            curves.append(Curve(_over_ranks(table.densification), colours[table.name], "points"))
    frame = Frame(
        "densification",
        "Rows that the first ranks touch together, by those that one touches",
        "times the rows of one rank",
        across="ranks",
    )
    caption = (
        "Densification: the rows that so many ranks touch together, by those that one touches: 1 if all touch the same "
        "rows, and the dashed line if no two touch the same."
    )
    guide = Key("muted", "no row in common", "guide")
    return Panel(title, draw_curves(frame, curves), (*legend, guide), caption)


def _over_ranks(values: FloatArray) -> Thinned:
    ranks = np.arange(1, len(values) + 1)
    return thin(ranks, values, points=len(values))


def _short(name: str) -> str:
    return name if len(name) <= TITLE_CHARACTERS else "…" + name[1 - TITLE_CHARACTERS :]
