"""`LogUniform`: rows drawn with a probability that falls with their number, as words do when sorted by frequency."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

_SEED = 0x5A317F1A


@dataclass(frozen=True, slots=True)
class LogUniform:
    """Draws row k with probability `log((k + 2) / (k + 1)) / log(num_rows + 1)`, several times; keeps each row once.

    That is Zipf's law for rows that are sorted by falling frequency (TensorFlow's `log_uniform_candidate_sampler`;
    Jozefowicz et al., *Exploring the Limits of Language Modeling*, 2016, section 3.1).

    Args:
        num_rows: Rows of the table.
        times: How often one is drawn.

    Example:
        >>> rows = LogUniform(num_rows=1000, times=50).draw(0)
        >>> len(rows), rows[:5].tolist()
        (38, [0, 1, 2, 3, 4])
    """

    num_rows: int
    times: int

    def draw(self, number: int) -> Tensor:
        """Distinct rows, ascending, on the CPU: a function of the draw's number alone, so the same on all ranks."""
        generator = torch.Generator().manual_seed(_SEED + number)
        uniform = torch.rand(self.times, dtype=torch.float64, generator=generator)
        rows = torch.exp(uniform * math.log(self.num_rows + 1)).long().sub_(1)
        return torch.unique(rows.clamp_(0, self.num_rows - 1))

    def log_chance(self, rows: Tensor) -> Tensor:
        """The logarithm of the probability that each row is among those that are kept, float64.

        Exponentials of the kept rows, each divided by its chance, add up to those of all rows on average (the
        estimator of Horvitz and Thompson).
        """
        once = torch.log1p(1 / (rows.double() + 1)) / math.log(self.num_rows + 1)
        return torch.log(-torch.expm1(self.times * torch.log1p(-once)))
