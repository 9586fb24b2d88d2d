"""The plots of the papers' figures, as SVG: ours as lines, the paper's numbers as black dots."""

from __future__ import annotations

from collections.abc import Sequence
from math import log
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("svg")
import matplotlib.pyplot as plt
from evidence import Curve, Panel
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

COLOURS = ("#1b6ca8", "#c8662c", "#2f8f7f", "#b08a1e", "#8a4f7d", "#7a7a7a", "#6fb1d8", "#444444")
# The same file for the same numbers, so that a figure drawn again changes nothing.
_STYLE: dict[Any, Any] = {
    "svg.hashsalt": "tulle",
    "svg.fonttype": "none",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
}


def draw(panel: Panel, path: Path) -> None:
    """Draw one panel into an SVG file."""
    with mpl.rc_context(_STYLE):
        figure, axes = plt.subplots(figsize=(5.6, 3.4))
        _curves(axes, panel.curves, are_named=bool(panel.places))
        axes.set(xlabel=panel.across, ylabel=panel.up)
        axes.set_title(panel.title, loc="left", fontsize=10)
        if panel.is_logarithmic:
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if panel.places else (1,)))
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axes.yaxis.set_minor_formatter(NullFormatter())
        else:
            axes.set_ylim(bottom=0)
        if panel.places:
            axes.set_xticks(range(1, len(panel.places) + 1), panel.places)
        else:
            axes.set_xscale("log")
            _ticks(axes, panel.curves)
        axes.grid(axis="y", color="#e8e8e8", linewidth=0.6)
        axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
        figure.savefig(path, metadata={"Date": None}, bbox_inches="tight")
        plt.close(figure)


def _curves(axes: Any, curves: Sequence[Curve], *, are_named: bool) -> None:
    """Lines, or, over names, marks that can be told apart where they lie on each other; the paper's are black."""
    colours = iter(COLOURS)
    markers = iter("osD^v")
    marks = iter(("o", "s", "^", "v", "D", "x"))
    for curve in curves:
        if curve.is_published:
            axes.plot(curve.x, curve.y, next(markers), color="black", markersize=5, label=curve.name, zorder=5)
        else:
            style = next(marks) if are_named else ".-"
            axes.plot(curve.x, curve.y, style, color=next(colours), linewidth=1.4, markersize=5, label=curve.name)


def _ticks(axes: Any, curves: Sequence[Curve]) -> None:
    """A tick at each place that a line has, less those that would touch."""
    places = sorted({place for curve in curves for place in curve.x})
    shown: list[float] = []
    for place in reversed(places):
        if not shown or log(shown[-1] / place) > 0.09 * log(places[-1] / places[0]):
            shown.append(place)
    axes.set_xticks(shown)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}" if value >= 100 else f"{value:.3g}"))
    axes.xaxis.set_minor_locator(NullLocator())
