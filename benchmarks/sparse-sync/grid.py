"""Generated gradients that cover what a scheme's cost depends on: density, overlap, skew, width and size."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy


@dataclass(frozen=True)
class Point:
    """One point of the grid.

    Args:
        num_rows: Rows of the table.
        width: Its columns.
        rows_per_rank: Distinct rows that each rank holds.
        overlap: Share of them that all ranks hold: Zen's overlap ratio between any two ranks.
        skew: Zen's skewness ratio for parts as many as there are ranks, 1 (even) to the number of ranks.
    """

    num_rows: int
    width: int
    rows_per_rank: int
    overlap: float = 0.3
    skew: float = 1.0

    @property
    def density(self) -> float:
        """Share of the table's rows that one rank holds."""
        return self.rows_per_rank / self.num_rows

    def __str__(self) -> str:
        """Short and unique, for tables and progress."""
        return f"{self.num_rows}x{self.width} d={self.density:.3g} o={self.overlap:g} s={self.skew:g}"


GRID = (
    *(Point(1_000, width, 100) for width in (16, 64, 512)),
    *(Point(50_000, 64, rows, overlap) for rows in (100, 1_000, 5_000) for overlap in (0.1, 0.5, 0.9)),
    *(Point(50_000, width, 1_000) for width in (16, 512)),
    *(Point(50_000, 512, rows, 0.5) for rows in (250, 4_000)),
    *(Point(50_000, 64, 1_000, 0.5, skew) for skew in (2.0, 4.0)),
    *(Point(50_000, 512, 1_000, 0.5, skew) for skew in (2.0, 4.0)),
    Point(50_000, 64, 5_000, 0.9, 4.0),
    *(Point(20_000, width, 8_000, 0.8) for width in (16, 64, 512)),
    *(Point(20_000, 64, rows, 0.8) for rows in (2_000, 4_000)),
    *(Point(500_000, 16, rows) for rows in (1_000, 10_000)),
    *(Point(300_000, 64, rows, 0.2) for rows in (1_000, 10_000)),
)


def draw(point: Point, ranks: int, seed: int = 0) -> list[numpy.ndarray]:
    """Distinct ascending row numbers of each rank, with the density, overlap and skew that the point asks for.

    All ranks share a core of rows; the others of each rank are its own. Of core and others alike, `skew / ranks` lie
    in the first of `ranks` equal parts of the table, the rest evenly in the others.

    Raises:
        ValueError: If no such rows exist: too little overlap or too much skew for so many rows.
    """
    generator = numpy.random.default_rng(seed)
    shared = round(point.overlap * point.rows_per_rank)
    own = point.rows_per_rank - shared
    shuffled_parts = [generator.permutation(part) for part in numpy.array_split(numpy.arange(point.num_rows), ranks)]
    taken = [0] * ranks
    core = _take(shuffled_parts, taken, shared, point.skew)
    return [numpy.sort(numpy.concatenate([core, _take(shuffled_parts, taken, own, point.skew)])) for _ in range(ranks)]


def _take(parts: list[numpy.ndarray], taken: list[int], count: int, skew: float) -> numpy.ndarray:
    """The next `count` rows: `skew / len(parts)` of them from the first part, the rest evenly from the others."""
    first = round(count * min(1.0, skew / len(parts)))
    others = len(parts) - 1
    # Cumulative, so that the parts' shares sum to the rest whatever the rounding.
    edges = [round((count - first) * other / others) for other in range(others + 1)] if others else [0]
    counts = [first, *(after - before for before, after in pairwise(edges))]
    chosen: list[numpy.ndarray] = []
    for number, (part, wanted) in enumerate(zip(parts, counts, strict=True)):
        chosen.append(part[taken[number] : taken[number] + wanted])
        taken[number] += wanted
        if taken[number] > len(part):
            raise ValueError(f"part {number} has {len(part)} rows, {taken[number]} are asked for")
    return numpy.concatenate(chosen)
