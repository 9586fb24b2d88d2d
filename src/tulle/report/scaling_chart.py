"""The chart of a forecast over several numbers of ranks: samples a second, beside what perfect scaling would give."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tulle.report.chart import Chart, Curve, Frame, draw_curves
from tulle.report.series import Thinned


def draw(points: Sequence[Mapping[str, Any]]) -> Chart | None:
    """Draw it; None if all points have as many ranks, or differ in more than their ranks."""
    ranks = [point["ranks"] for point in points]
    if len(set(ranks)) < len(ranks) or len(ranks) < 2:
        return None
    ordered = sorted(points, key=lambda point: point["ranks"])
    rates = [point["samples_per_s"] for point in ordered]
    perfect = [rates[0] / ordered[0]["ranks"] * point["ranks"] for point in ordered]
    frame = Frame("scaling", "Samples a second over the number of ranks", "samples/s", across="ranks")
    places = [point["ranks"] for point in ordered]
    curves = [Curve(_through(places, perfect), "muted", "guide"), Curve(_through(places, rates), "blue")]
    return draw_curves(frame, [*curves, Curve(_through(places, rates), "blue", "points")])


def _through(ranks: Sequence[int], values: Sequence[float]) -> Thinned:
    """Each point as it is."""
    places, heights = np.array(ranks, dtype=np.float64), np.array(values)
    return Thinned(places, heights, heights, heights, places)
