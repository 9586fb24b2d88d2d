"""`Law`: how often rows are looked up, by a Zipf law with a bend that is fitted to recorded batches.

The i-th most frequent of a table's rows is looked up so many times in a batch:

    rate_i = scale * i^-exponent * (1 + i / bend)^-0.77            i = 1 .. rows

so it is in the batch with probability 1 - exp(-rate_i), and in any of n batches with 1 - exp(-n rate_i). Distinct rows
of n batches are the sum of that. Words of a text have an exponent of about 1, and of about 1.77 beyond some thousand
words (Gerlach and Altmann, *Stochastic Model for the Vocabulary Growth in Natural Languages*, Physical Review X, 2013);
what has no bend is fitted with one that lies beyond all rows.

What is fitted is how distinct rows grow with the number of batches, which the recorded ones tell at 1, 2, .. m of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]

BEND = 0.77
"""By so much the exponent is larger beyond the bend."""
_BEND_DOUBT, _EXPONENT_DOUBT = 0.07, 0.1
"""In standard errors of the distinct rows: what it costs to assume a bend, or an exponent other than 1."""
_OFTEN = 0.2
"""Rows that are looked up so often in a batch are tossed for one by one."""
_POINTS = 12
_EXACT, _INTERVALS = 256, 400


@dataclass(frozen=True, slots=True)
class Law:
    """How often each row of a table is looked up in a batch.

    Args:
        rows: Rows of the table.
        scale: Lookups of the most frequent row in one batch, about.
        exponent: Of Zipf's law for the most frequent rows.
        bend: From about this place on rows are rarer than that.

    Example:
        >>> law = Law(rows=50_000, scale=200.0, exponent=1.0, bend=1e9)
        >>> [round(law.distinct(batches)) for batches in (1, 8, 1200)]
        [1189, 6209, 49937]
    """

    rows: int
    scale: float
    exponent: float
    bend: float

    def rates(self, places: Array) -> Array:
        """Lookups in a batch of the rows at these places of the order by frequency, from 1."""
        return self.scale * places**-self.exponent * (1 + places / self.bend) ** -BEND

    def distinct(self, batches: float) -> float:
        """Expected distinct rows of so many batches together."""
        places, weights = _intervals(self.rows)
        return float(weights @ -np.expm1(-batches * self.rates(places)))

    def batches(self, distinct: Array) -> Array:
        """How many batches, or what part of one, are expected to have so many distinct rows."""
        trial = np.geomspace(1e-3, 1e3, 121)
        return np.exp(np.interp(distinct, [self.distinct(batches) for batches in trial], np.log(trial)))


def fitted(times_held: Counts, batches: int, rows: int) -> Law:
    """The law that makes distinct rows grow as they did in some recorded batches.

    Args:
        times_held: `[distinct rows]`, of how many of the batches each row that was held at all was held.
        batches: How many were recorded.
        rows: Rows of the table.

    Source: the growth is Hurlbert's (*The Nonconcept of Species Diversity*, Ecology, 1971), the fit
    Levenberg-Marquardt's.

    Example:
        >>> law = fitted(np.array([4, 4, 4, 3, 2, 2, 1, 1, 1, 1, 1, 1]), batches=4, rows=1000)
        >>> round(law.distinct(1), 1), round(law.distinct(4), 1)
        (6.2, 12.0)
    """
    taken = np.unique(np.geomspace(1, batches, _POINTS).round()).astype(np.int64)
    target = np.log(_growth(times_held, batches, taken))
    weight = np.sqrt(len(times_held))
    begins = [(exponent, bend) for exponent in (0.7, 1.1) for bend in (rows, rows**0.5)]
    first = target[0] - np.log(np.log(rows + 1.0))
    found = [_least_squares(np.array([first, s, np.log(bend)]), taken, target, weight, rows) for s, bend in begins]
    _, best = min(found, key=lambda each: each[0])
    return Law(rows, float(np.exp(best[0])), float(best[1]), float(np.exp(best[2])))


def _growth(times_held: Counts, batches: int, taken: Counts) -> Array:
    """Expected distinct rows of `taken` batches chosen among the recorded: `sum_i 1 - C(m - c_i, k) / C(m, k)`."""
    log_factorial = np.concatenate([[0.0], np.log(np.arange(1, batches + 1)).cumsum()])
    times, how_many = np.unique(times_held, return_counts=True)
    missed = batches - times[:, None]
    left = missed - taken
    log_chance = (
        log_factorial[missed] - log_factorial[left.clip(0)] - log_factorial[batches] + log_factorial[batches - taken]
    )
    chance = np.where(left < 0, 0.0, np.exp(log_chance))  # that none of the batches that have it is taken
    return (1 - chance).T @ how_many.astype(np.float64)


def _least_squares(begin: Array, taken: Counts, target: Array, weight: float, rows: int) -> tuple[float, Array]:
    """Sum of squares and the point where it is least: logarithm of the scale, exponent, logarithm of the bend."""
    point, damping = begin, 1e-2
    residuals, slopes = _residuals(point, taken, target, weight, rows)
    for _ in range(60):
        curvature = slopes.T @ slopes
        damped = curvature + damping * np.diag(curvature.diagonal() + 1e-9)
        trial = point - np.linalg.solve(damped, slopes.T @ residuals).clip(-1.0, 1.0)
        tried, tried_slopes = _residuals(trial, taken, target, weight, rows)
        gain = residuals @ residuals - tried @ tried
        if gain > 0:
            point, residuals, slopes, damping = trial, tried, tried_slopes, damping / 3
        else:
            damping *= 4
        if 0 <= gain < 1e-9 or damping > 1e9:
            break
    return float(residuals @ residuals), point


def _residuals(point: Array, taken: Counts, target: Array, weight: float, rows: int) -> tuple[Array, Array]:
    """`[points + 2]`: how far the growth is off in standard errors, and the doubts; `[points + 2, 3]`: their slopes."""
    log_scale, exponent, log_bend = point.tolist()
    places, weights = _intervals(rows)
    beyond = places * np.exp(-log_bend)
    rates = np.exp(log_scale - exponent * np.log(places) - BEND * np.log1p(beyond))
    absent = np.exp(-taken[:, None] * rates)
    distinct = (1 - absent) @ weights
    by_rate = absent * (taken[:, None] * rates * weights) / distinct[:, None]
    by_parameter = np.stack([np.ones_like(places), -np.log(places), BEND * beyond / (1 + beyond)], axis=1)
    bent = rows * np.exp(-log_bend)
    residuals = [*(weight * (np.log(distinct) - target)), _BEND_DOUBT * np.log1p(bent)]
    doubts = [[0.0, 0.0, -_BEND_DOUBT * bent / (1 + bent)], [0.0, _EXPONENT_DOUBT, 0.0]]
    slopes = np.concatenate([weight * (by_rate @ by_parameter), doubts])
    return np.array([*residuals, _EXPONENT_DOUBT * (exponent - 1)]), slopes


@lru_cache(maxsize=64)
def _intervals(rows: int) -> tuple[Array, Array]:
    """Places that stand for all of `1 .. rows`, and for how many each: one by one first, then by growing intervals."""
    edges = np.arange(1.0, min(rows, _EXACT) + 2)
    if rows > _EXACT:
        wide = np.geomspace(_EXACT + 1, rows + 1, _INTERVALS).round()
        edges = np.unique(np.concatenate([edges, wide]))
    weights = np.diff(edges)
    return edges[:-1] + (weights - 1) / 2, weights


def drawn(law: Law, places: Array, batches: Sequence[float] | Array, generator: np.random.Generator) -> list[Counts]:
    """Rows of batches that follow a law.

    Args:
        law: The law.
        places: `[candidates]` places by frequency, of all rows or of a sample of them, ascending.
        batches: How large each batch is, 1 being that of the law.
        generator: Draws.

    Returns:
        For each batch which candidates it has: indices, ascending.
    """
    sizes = np.asarray(batches, dtype=np.float64)
    rates = law.rates(places)
    often = int(np.searchsorted(-rates, -_OFTEN))  # rates descend
    tail = rates[often:].cumsum()
    whole = float(tail[-1]) if len(tail) else 0.0
    # Of the many others the few lookups are drawn.
    lookups = generator.poisson(sizes * whole)
    found = often + np.searchsorted(tail, generator.random(int(lookups.sum())) * whole)
    ends = lookups.cumsum()
    rare = [np.unique(found[end - count : end]) for count, end in zip(lookups, ends, strict=True)]
    present = generator.random((len(sizes), often)) < -np.expm1(-sizes[:, None] * rates[:often])
    return [np.concatenate([np.flatnonzero(held), others]) for held, others in zip(present, rare, strict=True)]
