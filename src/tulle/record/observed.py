"""`as_line`: what one table's gradients looked like in a step, as a line of the record."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from tulle.engine import Observation

_RANKS_PAIRED = 64
"""Overlap of each pair is recorded for so many ranks at most."""


def as_line(observation: Observation, step: int) -> dict[str, Any]:
    """A line of kind `characteristics`; every rank knows the same."""
    looks, measured = observation.characteristics, observation.measured
    seen = {
        "kind": "characteristics",
        "step": step,
        "table": observation.table,
        "scheme": observation.scheme,
        "num_rows": looks.num_rows,
        "width": looks.width,
        "value_bytes": looks.value_bytes,
        "rows_per_rank": looks.rows_per_rank,
        "density": looks.density,
        "overlap_ratio": looks.overlap_ratio,
        "densification_ratio": looks.densification_ratio,
        "densification_curve": looks.densification_curve,
        "skewness_ratio": looks.skewness_ratio,
        "parts": looks.spread.parts(looks.num_rows),
        "candidates": [{"scheme": name, **asdict(cost)} for name, cost in observation.candidates],
        "measured_s": measured.seconds if measured else None,
        "measured_bytes": measured.bytes if measured else None,
    }
    return seen | ({"overlap": looks.spread.overlaps().tolist()} if looks.spread.ranks <= _RANKS_PAIRED else {})
