"""The plots of the report, as SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("svg")
import matplotlib.pyplot as plt
from figures import Spread, by_round, synchronization_s, ways_of
from matplotlib.ticker import NullFormatter

OURS, THEIRS, SHARDED = "#1b6ca8", "#b3b3b3", "#e0c07a"
# The same file for the same numbers, so that a report drawn again changes nothing.
_STYLE: dict[Any, Any] = {"svg.hashsalt": "tulle", "font.size": 8, "axes.spines.top": False, "axes.spines.right": False}


def plot_ways(setting: Mapping[str, Any], path: Path) -> bool:
    """A line a way (ours blue, sharded yellow), a panel a workload, with the spread; False if there is none."""
    rounds = setting["rounds"]
    measured = [name for name in setting["workloads"] if any(by_round(rounds, way, name) for way in ways_of(rounds))]
    if not measured:
        return False
    with mpl.rc_context(_STYLE):
        height = 0.6 + 0.17 * len(ways_of(rounds))
        figure, panels = plt.subplots(len(measured), 1, figsize=(7, height * len(measured)), squeeze=False)
        for panel, workload in zip(panels[:, 0], measured, strict=True):
            _dots(panel, rounds, workload)
        figure.tight_layout()
        _save(figure, path)
    return True


def plot_choices(points: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Predicted against measured seconds, a dot a point and scheme; what `auto` takes stands out."""
    with mpl.rc_context(_STYLE):
        figure, panel = plt.subplots(figsize=(5, 5))
        names = list(points[0]["schemes"])
        for name in names:
            runs = [point["schemes"][name] for point in points]
            panel.scatter([r["measured_s"] for r in runs], [r["predicted_s"] for r in runs], s=12, label=name)
        chosen = [point["schemes"][point["auto"]] for point in points]
        measured_s, predicted_s = ([run[key] for run in chosen] for key in ("measured_s", "predicted_s"))
        panel.scatter(measured_s, predicted_s, s=50, facecolors="none", edgecolors="black", label="taken by auto")
        ends = [min(measured_s), max(run["measured_s"] for point in points for run in point["schemes"].values())]
        panel.plot(ends, ends, color="grey", linewidth=0.8)
        panel.set(xscale="log", yscale="log", xlabel="measured, s", ylabel="predicted, s")
        panel.legend(frameon=False)
        figure.tight_layout()
        _save(figure, path)


def _dots(panel: Any, rounds: Sequence[Mapping[str, Any]], workload: str) -> None:
    # Dots and not bars: on a logarithmic scale a bar's length says nothing.
    peers, sharded = set(ways_of(rounds, peers=True)), set(ways_of(rounds, sharded=True))
    spreads = {
        way: Spread.of([max(1e-3, synchronization_s(run) * 1e3) for run in runs])
        for way in ways_of(rounds)
        if (runs := by_round(rounds, way, workload))
    }
    for way in sorted(spreads, key=lambda name: spreads[name].middle, reverse=True):
        spread = spreads[way]
        colour = SHARDED if way in sharded else THEIRS if way in peers else OURS
        error = [[spread.middle - spread.least], [spread.most - spread.middle]]
        panel.errorbar([spread.middle], [way], xerr=error, fmt="o", color=colour, markersize=4)
    panel.set(xscale="log", xlabel="ms of synchronization a step", title=workload)
    panel.xaxis.set_major_formatter("{x:g}")
    panel.xaxis.set_minor_formatter(NullFormatter())
    panel.grid(axis="y", color="#e8e8e8", linewidth=0.6)


def _save(figure: Any, path: Path) -> None:
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
