"""Columns of all ranks, laid side by side over the steps: means, thinning, and the parts of a step."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tulle.report.records import FloatArray, IntArray, RankLog, Run

WARM_UP_STEPS = 5
POINTS = 400


def steps_of(run: Run) -> IntArray:
    """Return all steps that any rank recorded, ascending: `[steps]`."""
    if not run.ranks:
        return np.array([], dtype=np.int64)
    return np.unique(np.concatenate([log.steps for log in run.ranks]))


def over_ranks(run: Run, column: Callable[[RankLog], FloatArray | None]) -> FloatArray:
    """Return `column` of every rank, `[ranks, steps]`; NaN where a rank did not record the step.

    Example:
        `over_ranks(run, lambda log: log.loss)`
    """
    steps = steps_of(run)
    matrix = np.full((len(run.ranks), len(steps)), math.nan)
    for row, log in enumerate(run.ranks):
        recorded = column(log)
        if recorded is not None:
            matrix[row, np.searchsorted(steps, log.steps)] = recorded
    return matrix


def mean_over_ranks(matrix: FloatArray) -> FloatArray:
    """Return the mean `[steps]` over the ranks that recorded the step; NaN where none did."""
    present = ~np.isnan(matrix)
    total = np.where(present, matrix, 0.0).sum(axis=0)
    counts = present.sum(axis=0)
    return np.divide(total, counts, out=np.full(len(total), math.nan), where=counts > 0)


def sum_over_ranks(matrix: FloatArray) -> FloatArray:
    """Return the sum `[steps]` over the ranks that recorded the step; NaN where none did."""
    absent = np.isnan(matrix)
    return np.where(absent.all(axis=0), math.nan, np.where(absent, 0.0, matrix).sum(axis=0))


def tokens_per_s(run: Run) -> FloatArray:
    """Return the tokens that all ranks together processed per second, `[steps]`; NaN where none were logged."""
    tokens = sum_over_ranks(over_ranks(run, lambda log: log.tokens))
    step_s = mean_over_ranks(over_ranks(run, lambda log: log.step_s))
    return np.divide(tokens, step_s, out=np.full(len(tokens), math.nan), where=step_s > 0)


def warmed_up(series: FloatArray) -> FloatArray:
    """Drop the first five steps, which are slow for other reasons; a run that has no more keeps them."""
    return series[..., WARM_UP_STEPS:] if series.shape[-1] > WARM_UP_STEPS else series


def median(series: FloatArray) -> float:
    """Return the median of the finite numbers; NaN if there is none."""
    finite = series[np.isfinite(series)]
    return float(np.median(finite)) if len(finite) else math.nan


@dataclass(frozen=True, slots=True)
class Parts:
    """Where the time went, each part `[ranks, steps]` in seconds; together they are the step."""

    forward: FloatArray
    backward: FloatArray
    waiting: FloatArray
    optimizer: FloatArray
    other: FloatArray

    def items(self) -> list[tuple[str, FloatArray]]:
        """Return the parts by name, in the order in which they are stacked."""
        return [
            ("forward", self.forward),
            ("backward", self.backward),
            ("waiting", self.waiting),
            ("optimizer", self.optimizer),
            ("other", self.other),
        ]


def parts_of_step(run: Run) -> Parts:
    """Split each step into parts that do not overlap.

    The time that a rank waited was recorded inside the part in which it waited, and is taken out of it. Where a
    record does not say which part that was, it is taken out of backward, and what does not fit there out of optimizer,
    other and forward, in this order. A part that was not recorded counts as other.
    """
    step = over_ranks(run, lambda log: log.step_s)

    def part(column: Callable[[RankLog], FloatArray]) -> FloatArray:
        matrix = over_ranks(run, column)
        return np.where(np.isnan(step), math.nan, np.where(np.isnan(matrix), 0.0, matrix))

    forward, backward = part(lambda log: log.forward_s), part(lambda log: log.backward_s)
    optimizer = part(lambda log: log.optimizer_s)
    other = np.maximum(step - forward - backward - optimizer, 0.0)
    waiting = np.minimum(part(lambda log: log.wait_s), step)
    told = over_ranks(run, lambda log: log.forward_wait_s)
    inside = [part(lambda log: log.backward_wait_s), part(lambda log: log.optimizer_wait_s)]
    inside += [part(lambda log: log.forward_wait_s)]
    inside.insert(2, np.where(np.isnan(told), 0.0, np.maximum(waiting - sum(inside), 0.0)))  # between the parts
    wholes, still_to_take = [backward, optimizer, other, forward], waiting
    for claims in (inside, [waiting] * len(wholes)):
        for place, claim in enumerate(claims):
            taken = np.minimum(np.minimum(wholes[place], claim), still_to_take)
            still_to_take = still_to_take - taken
            wholes[place] = wholes[place] - taken
    backward, optimizer, other, forward = wholes
    return Parts(forward=forward, backward=backward, waiting=waiting, optimizer=optimizer, other=other)


def mean_parts_of_rank(parts: Parts, row: int) -> dict[str, float]:
    """Return the mean time in seconds of each part of one rank's step, warm-up dropped."""
    return {name: _mean(warmed_up(part[row])) for name, part in parts.items()}


def _mean(series: FloatArray) -> float:
    finite = series[np.isfinite(series)]
    return float(finite.mean()) if len(finite) else 0.0


def traffic_keys(run: Run) -> list[tuple[str, str]]:
    """Return every (table, scheme) of the run, the one with the most bytes after the warm-up first."""
    keys = {key for log in run.ranks for key in log.traffic}
    steady = {key: float(warmed_up(traffic_of(run, key)).sum()) for key in keys}
    return sorted(keys, key=lambda key: (-steady[key], -float(traffic_of(run, key).sum()), key))


def traffic_of(run: Run, key: tuple[str, str]) -> FloatArray:
    """Return the bytes that a rank sent for one (table, scheme), `[steps]`, mean over the ranks."""
    sent = mean_over_ranks(over_ranks(run, lambda log: log.traffic.get(key, np.zeros(len(log.steps)))))
    return np.where(np.isnan(sent), 0.0, sent)


@dataclass(frozen=True, slots=True)
class Thinned:
    """A series in few points: each stands for a bin of consecutive records, with their mean and range."""

    steps: FloatArray
    mean: FloatArray
    low: FloatArray
    high: FloatArray
    edges: FloatArray

    @property
    def is_binned(self) -> bool:
        """Whether a bin holds more than one record, so that there is a range to show."""
        return bool((self.high > self.low).any())


def thin(steps: IntArray, series: FloatArray, *, points: int = POINTS) -> Thinned:
    """Thin a series `[steps]` to at most `points` bins of equally many records.

    What is NaN was not recorded and is left out; a bin with an infinity in it has no finite mean: NaN, so that
    a curve shows a gap there.
    """
    recorded = ~np.isnan(series)
    steps, series = steps[recorded], series[recorded]
    if len(steps) == 0:
        empty = np.array([])
        return Thinned(empty, empty, empty, empty, empty)
    starts = np.unique(np.linspace(0, len(steps), min(points, len(steps)), endpoint=False).astype(np.int64))
    sizes = np.diff(np.append(starts, len(steps)))
    total = np.add.reduceat(series, starts)
    gap = ~np.isfinite(total)
    with np.errstate(invalid="ignore"):
        return Thinned(
            steps=np.add.reduceat(steps.astype(np.float64), starts) / sizes,
            mean=np.where(gap, math.nan, total / sizes),
            low=np.where(gap, math.nan, np.minimum.reduceat(series, starts)),
            high=np.where(gap, math.nan, np.maximum.reduceat(series, starts)),
            edges=np.append(steps[starts], steps[-1] + 1).astype(np.float64) - 0.5,
        )


def smooth(series: FloatArray, window: int) -> FloatArray:
    """Return the centred running mean over `window` points, shorter at the ends; NaN is left out."""
    finite = np.isfinite(series)
    kernel = np.ones(window)
    total = np.convolve(np.where(finite, series, 0.0), kernel, mode="same")
    counts = np.convolve(finite.astype(np.float64), kernel, mode="same")
    return np.where(finite, total / np.maximum(counts, 1.0), math.nan)


def relative_difference(steps: Sequence[IntArray], series: Sequence[FloatArray]) -> tuple[IntArray, FloatArray]:
    """Return the steps that two runs both logged and |a - b| / |b| at each, `[common steps]`."""
    common, first, second = np.intersect1d(steps[0], steps[1], return_indices=True)
    a, b = series[0][first], series[1][second]
    usable = np.isfinite(a) & np.isfinite(b) & (b != 0)
    return common[usable], np.abs(a[usable] - b[usable]) / np.abs(b[usable])
