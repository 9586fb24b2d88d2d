"""Whether one way is as fast as the best of several, told apart from luck.

The least of nine noisy medians is less than what any of nine equal schemes takes: who is held against it loses. So the
best is chosen by one half of the rounds and compared in the other, and the other way round:

    round      1    2    3    4    5    6    7    8
    chosen     x         x         x         x            -> best: ring
    compared        x         x         x         x       -> seconds by those of ring, round by round
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import comb
from random import Random
from statistics import median

NEAR = 1.05
CONFIDENCE = 0.95
LEAST_ROUNDS, MOST_ROUNDS = 6, 96
FAR_BEHIND = 1.3
"""A way that takes so many times as long as the fastest is timed no further."""


@dataclass(frozen=True)
class Ratio:
    """The median of ratios, and the interval in which it lies with 95% confidence, whatever their distribution."""

    middle: float
    low: float
    high: float

    @staticmethod
    def of(ratios: Sequence[float]) -> Ratio:
        """By order statistics: how many of n values lie below their median is binomial; too few give their range."""
        ordered = sorted(ratios)
        n = len(ordered)
        outside = [2 * sum(comb(n, below) for below in range(cut + 1)) / 2**n for cut in range(n // 2)]
        cut = max((cut for cut, risk in enumerate(outside) if risk <= 1 - CONFIDENCE), default=0)
        return Ratio(median(ordered), ordered[cut], ordered[-1 - cut])

    @property
    def is_met(self) -> bool:
        """Whether it is at most 1.05 for certain."""
        return self.high <= NEAR

    @property
    def is_missed(self) -> bool:
        """Whether it is more than 1.05 for certain."""
        return self.low > NEAR


def held_against_best(seconds: Sequence[float], others: Mapping[str, Sequence[float]]) -> Ratio:
    """Seconds of one way by those of the best of others in the same round; those that dropped out are not the best."""
    racing = {name: times for name, times in others.items() if len(times) == len(seconds)}
    ratios: list[float] = []
    for half in (0, 1):
        best = min(racing, key=lambda name: median(racing[name][1 - half :: 2]))
        ratios += [mine / theirs for mine, theirs in zip(seconds[half::2], racing[best][half::2], strict=True)]
    return Ratio.of(ratios)


def race(one: str, others: Sequence[str], time_s: Callable[[str], float], budget_s: float) -> dict[str, list[float]]:
    """Time ways in interleaved rounds, until it is certain whether `one` is near the best of the others.

    Ranks that get the same seconds from `time_s` do the same.

    Args:
        one: The way that is held against the others.
        others: Which they are.
        time_s: Does what a way does, once, and gives its seconds.
        budget_s: Rounds are doubled only if that takes no longer.
    """
    seconds: dict[str, list[float]] = {name: [] for name in (one, *others)}
    racing = [*seconds]
    order = Random(0)
    # Looked at seldom: who looks after every round stops at a lucky one.
    look = LEAST_ROUNDS
    for number in range(1, MOST_ROUNDS + 1):
        # Shuffled, not turned: what always comes after the same slow one finds cold caches.
        for name in order.sample(racing, len(racing)):
            seconds[name].append(time_s(name))
        if number == look:
            middles = {name: median(seconds[name]) for name in racing}
            fastest_s = min(middles[name] for name in racing if name != one)
            racing = [name for name in racing if name == one or middles[name] <= FAR_BEHIND * fastest_s]
            ratio = held_against_best(seconds[one], {name: seconds[name] for name in others})
            if ratio.is_met or ratio.is_missed or number * sum(middles[name] for name in racing) > budget_s:
                break
            look *= 2
    return seconds
