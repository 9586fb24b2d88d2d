"""`Noise` and `Stragglers`: by what factor the computation of each rank takes longer in each step."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tulle.errors import PlanError

Array = npt.NDArray[np.float64]
MOST_NOISE = 100
"""Coefficient of variation: of a larger one no number of steps tells anything."""


@dataclass(frozen=True, slots=True)
class Noise:
    """Computation takes another time on each rank and in each step: longer sentences, other programs, warm devices.

    Args:
        coefficient: Standard deviation of a rank's computation in a step by its mean, which is as without noise; its
            distribution is lognormal.

    Raises:
        PlanError: If the coefficient is negative, beyond `MOST_NOISE`, or no number.
    """

    coefficient: float

    def __post_init__(self) -> None:
        if not 0 <= self.coefficient <= MOST_NOISE:
            raise PlanError(
                f"noise of {self.coefficient}: a coefficient of variation such as 0.05 is needed, at most {MOST_NOISE}"
            )

    def factors(self, shape: tuple[int, ...], generator: np.random.Generator) -> Array:
        """Of each rank in one step; their expectation is 1."""
        variance = math.log1p(self.coefficient**2)  # of the logarithm
        return generator.lognormal(-variance / 2, math.sqrt(variance), shape)


@dataclass(frozen=True, slots=True)
class Stragglers:
    """Some ranks compute more slowly than the others, always the same ones: a hot device, a host that others use too.

    Args:
        share: Of all ranks, 0 to 1; rounded to whole ranks, a half up.
        factor: By which their computation takes longer.

    Raises:
        PlanError: If there is no such share or factor.
    """

    share: float
    factor: float

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1 or not 0 < self.factor < math.inf:
            raise PlanError(
                f"stragglers of share {self.share} and factor {self.factor}: a share of ranks from 0 to 1 and a factor "
                "such as 1.5 are needed"
            )

    def count(self, ranks: int) -> int:
        """How many of some ranks are slow: none, if less than half a rank would be.

        Example:
            >>> [Stragglers(0.01, 1.5).count(ranks) for ranks in (2, 50, 1200)]
            [0, 1, 12]
        """
        return math.floor(self.share * ranks + 0.5)

    def factors(self, shape: tuple[int, ...], generator: np.random.Generator) -> Array:
        """By what factor each rank is slower, in all steps alike."""
        found = np.ones(math.prod(shape))
        slow = generator.choice(len(found), self.count(len(found)), replace=False)
        found[slow] = self.factor
        return found.reshape(shape)


def slownesses(
    shape: tuple[int, ...], noise: Noise | None, stragglers: Stragglers | None, seed: int
) -> Iterator[Array | None]:
    """By what factor each rank computes more slowly, in one step after the other; None where all are alike."""
    generator = np.random.default_rng(seed)
    always = stragglers.factors(shape, generator) if stragglers else None
    while True:
        if not noise:
            yield always
            continue
        now = noise.factors(shape, generator)
        yield now if always is None else now * always
