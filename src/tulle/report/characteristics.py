"""What was observed of each table's gradients over a run: the characteristics, and what synchronizing it took."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from tulle.report.records import Candidate, Characteristics, FloatArray, IntArray, Measured, Observation, Run
from tulle.report.series import WARM_UP_STEPS, mean_over_ranks, median, over_ranks, steps_of


@dataclass(frozen=True, slots=True)
class ObservedTable:
    """One table of a run; numbers are medians over the observations, those of the first five steps left out.

    Args:
        name: Its name in the model.
        rows: Rows of the table.
        width: Columns.
        ranks: Number of ranks that share it.
        observations: How many there were.
        characteristics: Density, overlap, densification and skewness.
        steps: `[steps]`, at which the density is known.
        density: `[steps]`, share of the rows that a rank touched, mean over the ranks.
        overlap: `[ranks, ranks]`, of each two ranks; None if it was not recorded.
        densification: `[ranks]`, of the first 1, 2, ... ranks.
        parts: `[ranks]`, each contiguous part's share of the touched rows.
        scheme: The scheme in force at the last observation.
        candidates: Predicted cost by scheme, the cheapest first.
        measured: What each scheme that was in force took.
    """

    name: str
    rows: int
    width: int
    ranks: int
    observations: int
    characteristics: Characteristics
    steps: IntArray
    density: FloatArray
    overlap: FloatArray | None
    densification: FloatArray
    parts: FloatArray
    scheme: str
    candidates: tuple[Candidate, ...]
    measured: Mapping[str, Measured]

    @property
    def lowest_density(self) -> float:
        """The lowest density of any step."""
        return float(self.density.min())

    @property
    def highest_density(self) -> float:
        """The highest density of any step."""
        return float(self.density.max())

    @property
    def predicted(self) -> Candidate | None:
        """What the scheme in force was predicted to cost, None if it was not a candidate."""
        return next((one for one in self.candidates if one.scheme == self.scheme), None)

    def as_json(self) -> dict[str, object]:
        """What the summary says of it; None is what was not measured."""
        looks, measured = self.characteristics, self.measured.get(self.scheme)
        return {
            "rows": self.rows,
            "width": self.width,
            "ranks": self.ranks,
            "density": _or_none(looks.density),
            "lowest_density": _or_none(self.lowest_density),
            "highest_density": _or_none(self.highest_density),
            "overlap_ratio": _or_none(looks.overlap_ratio),
            "densification_ratio": _or_none(looks.densification_ratio),
            "skewness_ratio": _or_none(looks.skewness_ratio),
            "scheme": self.scheme,
            "predicted": _cost_as_json(self.predicted),
            "measured": _cost_as_json(measured),
            "candidates": [{"scheme": one.scheme, **(_cost_as_json(one) or {})} for one in self.candidates],
        }


def observed_tables(run: Run) -> tuple[ObservedTable, ...]:
    """Return every table that was observed, the one whose touched rows hold the most bytes first."""
    by_table: dict[str, dict[int, Observation]] = {}
    for log in run.ranks:  # all ranks see the same gradients: the first that recorded a step counts
        for observation in log.observations:
            by_table.setdefault(observation.table, {}).setdefault(observation.step, observation)
    tables = [_observed(run, [seen[step] for step in sorted(seen)]) for seen in by_table.values()]
    return tuple(sorted(tables, key=lambda table: (-_touched(table), table.name)))


def _observed(run: Run, observations: list[Observation]) -> ObservedTable:
    latest = observations[-1]
    alike = [one for one in observations if one.ranks == latest.ranks and one.rows == latest.rows]
    settled = [one for one in alike if one.step > WARM_UP_STEPS] or alike
    steps, density = _density(run, latest, alike)
    matrices = [one.overlap for one in settled if one.overlap is not None]
    return ObservedTable(
        name=latest.table,
        rows=latest.rows,
        width=latest.width,
        ranks=latest.ranks,
        observations=len(alike),
        characteristics=Characteristics(
            density=_median(one.characteristics.density for one in settled),
            overlap_ratio=_median(one.characteristics.overlap_ratio for one in settled),
            densification_ratio=_median(one.characteristics.densification_ratio for one in settled),
            skewness_ratio=_median(one.characteristics.skewness_ratio for one in settled),
        ),
        steps=steps,
        density=density,
        overlap=np.median(matrices, axis=0) if matrices else None,
        densification=np.median([one.densification for one in settled], axis=0),
        parts=np.mean([one.parts for one in settled], axis=0),
        scheme=latest.scheme,
        candidates=_candidates(settled),
        measured=_measured(settled),
    )


def _density(run: Run, latest: Observation, observations: list[Observation]) -> tuple[IntArray, FloatArray]:
    """Every step has the number of rows where the ranks recorded it; where they did not, the observed steps do."""
    touched = mean_over_ranks(over_ranks(run, lambda log: log.rows.get(latest.table)))
    recorded = ~np.isnan(touched)
    if recorded.any() and latest.rows:
        return steps_of(run)[recorded], touched[recorded] / latest.rows
    steps = np.array([one.step for one in observations], dtype=np.int64)
    return steps, np.array([one.characteristics.density for one in observations])


def _candidates(observations: list[Observation]) -> tuple[Candidate, ...]:
    names = dict.fromkeys(one.scheme for observation in observations for one in observation.candidates)
    medians = []
    for name in names:
        offers = [one for observation in observations for one in observation.candidates if one.scheme == name]
        costs = ((one.bytes, one.messages, one.seconds) for one in offers)
        medians.append(Candidate(name, *map(_median, zip(*costs, strict=True))))
    return tuple(sorted(medians, key=lambda one: one.seconds))


def _measured(observations: list[Observation]) -> dict[str, Measured]:
    by_scheme: dict[str, list[Measured]] = {}
    for one in observations:
        by_scheme.setdefault(one.scheme, []).append(one.measured)
    return {
        scheme: Measured(
            _median(one.bytes for one in taken),
            _median(one.messages for one in taken),
            _median(one.seconds for one in taken),
        )
        for scheme, taken in by_scheme.items()
    }


def _touched(table: ObservedTable) -> float:
    density = table.characteristics.density
    return density * table.rows * table.width if math.isfinite(density) else 0.0


def _median(numbers: Iterable[float]) -> float:
    return median(np.array([*numbers], dtype=np.float64))


def _cost_as_json(cost: Candidate | Measured | None) -> dict[str, float | None] | None:
    if cost is None:
        return None
    return {"bytes": _or_none(cost.bytes), "messages": _or_none(cost.messages), "seconds": _or_none(cost.seconds)}


def _or_none(number: float) -> float | None:
    return number if math.isfinite(number) else None
