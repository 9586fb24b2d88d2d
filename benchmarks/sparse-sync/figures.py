"""Numbers from raw results: seconds of synchronization, ratios within a round, medians and spreads. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from race import Ratio, held_against_best

Rounds = Sequence[Mapping[str, Any]]
"""By round, by way: what `runner.run_way` gave."""


@dataclass(frozen=True)
class Spread:
    """Median, least and most over rounds."""

    middle: float
    least: float
    most: float

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        """Of at least one value."""
        return Spread(median(values), min(values), max(values))


def synchronization_s(measured: Mapping[str, Any]) -> float:
    """Seconds that a step takes beyond the same step without communication: medians over steps, at least 0."""
    return max(0.0, median(measured["step_s"]) - median(measured["local_step_s"]))


def by_round(rounds: Rounds, way: str, workload: str) -> list[Mapping[str, Any]]:
    """What one way measured on one workload, in the rounds in which it did."""
    found = (one.get(way, {}).get("workloads", {}).get(workload) for one in rounds)
    return [measured for measured in found if measured]


def step_s(measured: Mapping[str, Any]) -> float:
    """Seconds of a whole step, median over steps."""
    return median(measured["step_s"])


def ratios(
    rounds: Rounds,
    way: str,
    other: str,
    workload: str,
    seconds: Callable[[Mapping[str, Any]], float] = synchronization_s,
) -> list[float]:
    """Seconds of synchronization (or others) of `way` divided by those of `other`, round by round."""
    found: list[float] = []
    for one in rounds:
        pair = [by_round([one], name, workload) for name in (way, other)]
        if all(pair) and seconds(pair[1][0]) > 0:
            found.append(seconds(pair[0][0]) / seconds(pair[1][0]))
    return found


def ways_of(rounds: Rounds, *, peers: bool | None = None, sharded: bool | None = None) -> list[str]:
    """Names of the ways, in the order in which they ran; only peers or not, only sharded or not, if asked for."""
    kinds = {name: result for one in rounds for name, result in one.items()}
    return [
        name
        for name, result in kinds.items()
        if peers in (None, result["is_peer"]) and sharded in (None, result["is_sharded"])
    ]


def best(rounds: Rounds, ways: Sequence[str], workload: str) -> str | None:
    """The way of least median seconds of synchronization; None if none of them measured the workload."""
    middles = {
        way: median(synchronization_s(measured) for measured in runs)
        for way in ways
        if (runs := by_round(rounds, way, workload))
    }
    return min(middles, key=middles.__getitem__) if middles else None


@dataclass(frozen=True)
class GridFigures:
    """How well costs were predicted, and schemes chosen, on the grid."""

    points: int
    median_seconds_error: float
    worst_bytes_error: float
    near_best: int
    """Points on which `auto` is within 5% of the best scheme for certain."""
    far_from_best: int
    """Points on which it is not, for certain."""
    worst_choice: Ratio


def grid_figures(points: Sequence[Mapping[str, Any]]) -> GridFigures:
    """Errors relative to what was measured; seconds of `auto` relative to the best scheme's."""
    runs = [run for point in points for run in point["schemes"].values()]
    seconds_errors = [abs(run["predicted_s"] - run["measured_s"]) / run["measured_s"] for run in runs]
    bytes_errors = [
        abs(run["predicted_bytes"] - run["measured_bytes"]) / run["measured_bytes"]
        for run in runs
        if run["measured_bytes"]
    ]
    ratios = [choice_ratio(point) for point in points]
    return GridFigures(
        points=len(points),
        median_seconds_error=median(seconds_errors),
        worst_bytes_error=max(bytes_errors, default=0.0),
        near_best=sum(ratio.is_met for ratio in ratios),
        far_from_best=sum(ratio.is_missed for ratio in ratios),
        worst_choice=max(ratios, key=lambda ratio: ratio.middle),
    )


def choice_ratio(point: Mapping[str, Any]) -> Ratio:
    """Seconds of `auto` by those of the best scheme, the best chosen by other rounds than are compared."""
    schemes = {name: run["all_measured_s"] for name, run in point["schemes"].items()}
    # Where `auto` was not timed by itself (results of 2026-11-21), the scheme that it took stands for it.
    return held_against_best(point.get("auto_s") or schemes[point["auto"]], schemes)


def best_scheme(point: Mapping[str, Any]) -> str:
    """The scheme of least median seconds."""
    return min(point["schemes"], key=lambda name: point["schemes"][name]["measured_s"])
