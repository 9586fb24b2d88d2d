"""Draws charts with matplotlib as inline SVG, which takes its colours and its font from the page."""

import io
import math
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import matplotlib
import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, MaxNLocator

from tulle.report.records import FloatArray
from tulle.report.series import Thinned

# Matplotlib wants colours, the page has them (light and dark, page.css): each name is drawn in a colour that
# stands for it and is replaced by the page's variable in the finished SVG.
SERIES = ("blue", "orange", "teal", "gold", "plum", "grey", "sky")
NAMES = ("muted", "line", "page", "ink", *SERIES)
COLOURS = {name: f"#0000{number:02x}" for number, name in enumerate(NAMES, start=1)}
KINDS = {"line": (1.6, 1.0), "wide": (5.0, 0.55), "faint": (0.8, 0.4), "guide": (1.2, 1.0)}  # width in pixels, opacity
TEXT_PX = 12
BARS_DRAWN = 72
CELL_WITH_TEXT_PX = 22
NO_METADATA = dict.fromkeys(("Date", "Creator", "Format", "Type"))
STYLE: dict[Any, Any] = {  # matplotlib types the keys as a list of literals
    "svg.fonttype": "none",
    "svg.hashsalt": "tulle",
    "text.parse_math": False,
    "font.family": "DejaVu Sans",  # ships with matplotlib; the page's own, narrower font is shown
    "font.size": TEXT_PX,
    "path.simplify": True,
    "axes.unicode_minus": True,
}


@dataclass(frozen=True, slots=True)
class Curve:
    """A line of a chart. `wide` lies pale under another line, `points` are dots, a `guide` is dashed."""

    thinned: Thinned
    colour: str
    kind: Literal["line", "wide", "faint", "points", "guide"] = "line"


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer of a stacked chart: `heights` has one number for each bin."""

    heights: FloatArray
    colour: str


@dataclass(frozen=True, slots=True)
class Bars:
    """A series of a bar chart: one bar at each of 1, 2, ... `[places]`, beside those of the other series."""

    heights: FloatArray
    colour: str


@dataclass(frozen=True, slots=True)
class Square:
    """A square of cells, shaded from 0 to 1, NaN left blank; a cell is of several ranks if there are more of them."""

    title: str
    cells: FloatArray
    ranks: int


@dataclass(frozen=True, slots=True)
class Frame:
    """What surrounds a chart: its name (unique on the page), what it shows in words, both units, range."""

    name: str
    description: str
    unit: str
    from_zero: bool = True
    top: float | None = None
    across: str = "step"
    is_logarithmic: bool = False


@dataclass(frozen=True, slots=True)
class Chart:
    """One chart, drawn twice: an SVG scales its text with it, so that a phone needs a narrower drawing."""

    wide: Markup
    narrow: Markup


@dataclass(frozen=True, slots=True)
class Drawing:
    """A size in which charts are drawn, in CSS pixels."""

    name: str
    width_px: int
    height_px: int
    steps_ticks: int
    squares_in_row: int


WIDE = Drawing("wide", 540, 250, 6, 3)
NARROW = Drawing("narrow", 340, 220, 4, 2)


def draw_curves(frame: Frame, curves: Sequence[Curve]) -> Chart:
    """Draw lines over the steps, the first at the bottom."""
    return Chart(*(_svg(frame, drawing, lambda axes: _curves(axes, curves)) for drawing in (WIDE, NARROW)))


def draw_stack(frame: Frame, edges: FloatArray, layers: Sequence[Layer]) -> Chart:
    """Draw layers on top of each other over the steps; `edges` `[bins + 1]` bound the bins."""
    return Chart(*(_svg(frame, drawing, lambda axes: _stack(axes, edges, layers)) for drawing in (WIDE, NARROW)))


def draw_bars(frame: Frame, series: Sequence[Bars], guide: float) -> Chart:
    """Draw bars side by side at 1, 2, ..., and a dashed line at the height `guide`; very many become outlines."""
    return Chart(*(_svg(frame, drawing, lambda axes: _bars(axes, series, guide)) for drawing in (WIDE, NARROW)))


def draw_squares(frame: Frame, squares: Sequence[Square]) -> Chart:
    """Draw squares of shaded cells in rows, each with its title above it."""
    return Chart(_squares(frame, squares, WIDE), _squares(frame, squares, NARROW))


def _curves(axes: Axes, curves: Sequence[Curve]) -> None:
    for order, curve in enumerate(curves, start=2):
        thinned, colour = curve.thinned, COLOURS[curve.colour]
        if curve.kind == "points" or len(thinned.steps) == 1:
            axes.plot(
                thinned.steps,
                thinned.mean,
                linestyle="none",
                marker="o",
                markersize=7,
                markerfacecolor=colour,
                markeredgecolor=COLOURS["page"],
                markeredgewidth=1.2,
                zorder=order + 10,
            )
            continue
        width, alpha = KINDS[curve.kind]
        axes.plot(
            thinned.steps,
            thinned.mean,
            color=colour,
            linewidth=width,
            alpha=alpha,
            linestyle=(0, (4, 3)) if curve.kind == "guide" else "solid",
            zorder=order,
            solid_joinstyle="round",
        )
        if curve.kind == "line" and thinned.is_binned:
            axes.fill_between(
                thinned.steps, thinned.low, thinned.high, color=colour, alpha=0.16, linewidth=0, zorder=order - 0.5
            )


def _stack(axes: Axes, edges: FloatArray, layers: Sequence[Layer]) -> None:
    base = np.zeros(len(edges) - 1)
    for layer in layers:
        top = base + layer.heights
        axes.fill_between(
            edges,
            np.append(base, base[-1]),
            np.append(top, top[-1]),
            step="post",
            color=COLOURS[layer.colour],
            linewidth=0,
            zorder=2,
        )
        base = top
    axes.set_xlim(edges[0], edges[-1])


def _bars(axes: Axes, series: Sequence[Bars], guide: float) -> None:
    places = np.arange(1, len(series[0].heights) + 1)
    axes.axhline(guide, color=COLOURS["muted"], linewidth=1.2, linestyle=(0, (4, 3)), zorder=4)
    if len(series) * len(places) > BARS_DRAWN:
        for bars in series:
            axes.stairs(bars.heights, np.append(places, len(places) + 1) - 0.5, color=COLOURS[bars.colour], zorder=3)
        return
    width = 0.8 / len(series)
    for number, bars in enumerate(series):
        left = places - 0.4 + (number + 0.5) * width
        axes.bar(left, bars.heights, 0.92 * width, color=COLOURS[bars.colour], linewidth=0, zorder=3)


def _squares(frame: Frame, squares: Sequence[Square], drawing: Drawing) -> Markup:
    columns = min(len(squares), drawing.squares_in_row)
    rows = -(-len(squares) // columns)
    drawing = replace(drawing, height_px=rows * min(drawing.height_px, drawing.width_px // columns + 30))

    def draw(figure: Figure) -> None:
        grid = np.atleast_1d(figure.subplots(rows, columns, squeeze=False)).ravel()
        cell_px = min(drawing.width_px / columns, drawing.height_px / rows - 30) * 0.85
        for axes, square in zip(grid, squares, strict=False):
            _square(axes, square, cell_px / len(square.cells))
        for axes in grid[len(squares) :]:
            axes.set_axis_off()

    return _inline(_figure(drawing, draw), frame, drawing)


def _square(axes: Axes, square: Square, cell_px: float) -> None:
    side = square.ranks / len(square.cells)  # of a cell, in ranks
    for row, column in np.argwhere(np.isfinite(square.cells)):
        value = float(np.clip(square.cells[row, column], 0.0, 1.0))
        x, y = column * side - 0.5, row * side - 0.5
        axes.add_patch(Rectangle((x, y), side, side, facecolor=COLOURS["blue"], alpha=value, linewidth=0))
        if cell_px >= CELL_WITH_TEXT_PX:
            colour = COLOURS["page" if value > 0.6 else "ink"]
            place = (x + side / 2, y + side / 2)
            axes.text(*place, f"{100 * value:.0f}", ha="center", va="center", color=colour, fontsize=TEXT_PX)
    axes.set(xlim=(-0.5, square.ranks - 0.5), ylim=(square.ranks - 0.5, -0.5), aspect="equal")
    axes.set_title(square.title, fontsize=TEXT_PX, color=COLOURS["muted"], pad=6)
    axes.spines[:].set_color(COLOURS["line"])
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(nbins=4, integer=True, min_n_ticks=1))
        axis.set_major_formatter(FuncFormatter(_tick))
    axes.tick_params(length=0, labelcolor=COLOURS["muted"], pad=4)


def _svg(frame: Frame, drawing: Drawing, draw: Callable[[Axes], None]) -> Markup:
    def draw_dressed(figure: Figure) -> None:
        axes = figure.subplots()
        draw(axes)
        _dress(axes, frame, drawing)

    return _inline(_figure(drawing, draw_dressed), frame, drawing)


def _figure(drawing: Drawing, draw: Callable[[Figure], None]) -> str:
    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure = Figure(figsize=(drawing.width_px / 72, drawing.height_px / 72), layout="constrained")
        FigureCanvasSVG(figure)
        draw(figure)
        file = io.StringIO()
        figure.savefig(file, format="svg", transparent=True, metadata=NO_METADATA)
    return file.getvalue()


def _dress(axes: Axes, frame: Frame, drawing: Drawing) -> None:
    """Put units, ticks and hairlines round the drawing: no box, no upright text."""
    muted, line = COLOURS["muted"], COLOURS["line"]
    axes.set_title(frame.unit, loc="left", fontsize=TEXT_PX, color=muted, pad=9)
    axes.set_xlabel(frame.across, loc="right", fontsize=TEXT_PX, color=muted, labelpad=2)
    axes.spines[["top", "left", "right"]].set_visible(False)
    axes.spines["bottom"].set_color(line)
    axes.grid(axis="y", color=line, linewidth=0.8, zorder=0)
    axes.set_axisbelow(True)
    axes.tick_params(axis="y", length=0, labelcolor=muted, pad=6)
    axes.tick_params(axis="x", length=3, color=line, labelcolor=muted)
    axes.margins(x=0.015)
    if frame.is_logarithmic:
        axes.set_yscale("log")
        low, high = np.log10(axes.get_ylim())
        axes.set_ylim(10.0 ** math.floor(low), 10.0 ** math.ceil(high))  # whole decades, so that there are ticks
        axes.minorticks_off()
    else:
        if frame.from_zero:
            top = 1.05 * axes.dataLim.y1 if frame.top is None else frame.top  # a level line lies below the edge, too
            axes.set_ylim(bottom=0, top=top if top > 0 else None)
        axes.yaxis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_locator(MaxNLocator(nbins=drawing.steps_ticks, integer=True, min_n_ticks=1))
    axes.xaxis.set_major_formatter(FuncFormatter(_tick))
    axes.yaxis.set_major_formatter(FuncFormatter(_tick))


def _tick(value: float, _position: int | None = None) -> str:
    if abs(value) >= 1e10:
        return f"{value:.3g}"  # a loss that explodes
    if abs(value) >= 1e7:
        return f"{value / 1e6:,.4g} M"
    return f"{value:,.0f}" if math.isclose(value, round(value), abs_tol=1e-9) else f"{value:,.4g}"


def _inline(svg: str, frame: Frame, drawing: Drawing) -> Markup:
    """Turn a file of SVG into an element of the page: own ids, the page's colours, a description."""
    svg = svg[svg.index("<svg") :]
    prefix = f"{frame.name}-{drawing.name}-"
    svg = re.sub(r'\bid="', f'id="{prefix}', svg)
    svg = re.sub(r'xlink:href="#', f'href="#{prefix}', svg)
    svg = svg.replace("url(#", f"url(#{prefix}")
    svg = re.sub(r"font-family: [^;]*; ", "", re.sub(r"<style.*?</style>", "", svg, flags=re.DOTALL))
    svg = re.sub(r' d="[^"]*"', lambda path: re.sub(r"(\.\d)\d+", r"\1", path[0]).replace(" \n", ""), svg)
    for name, placeholder in COLOURS.items():
        svg = svg.replace(placeholder, f"var(--{name})")
    view = f'viewBox="0 0 {drawing.width_px} {drawing.height_px}"'
    opening = Markup('<svg class="{}" {} role="img" aria-label="{}">').format(
        drawing.name, Markup(view), frame.description
    )
    return opening + Markup(svg[svg.index(">") + 1 :].strip())
