"""Reads the lines of kind `characteristics`: what a table's gradients looked like in one step, on all ranks."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from tulle.report.records import Candidate, Characteristics, FloatArray, Measured, Observation


def read_observation(record: Mapping[str, Any]) -> Observation:
    """Read one line.

    Raises:
        KeyError, TypeError, ValueError, AttributeError: It is not one that this version writes.
    """
    ranks = len(record["rows_per_rank"])
    if ranks == 0:
        raise ValueError("no rank held the table")
    return Observation(
        step=int(record["step"]),
        table=str(record["table"]),
        rows=int(record["num_rows"]),
        width=int(record["width"]),
        ranks=ranks,
        characteristics=read_characteristics(record),
        overlap=_shaped(record["overlap"], ranks, ranks) if record.get("overlap") else None,
        densification=_shaped(record["densification_curve"], ranks),
        parts=_shaped(record["parts"], ranks),
        scheme=str(record["scheme"]),
        candidates=read_candidates(record.get("candidates")),
        measured=Measured(
            or_nan(record.get("measured_bytes")),
            or_nan(record.get("measured_messages")),
            or_nan(record.get("measured_s")),
        ),
    )


def read_characteristics(recorded: Mapping[str, Any]) -> Characteristics:
    """Read the four numbers of one table."""
    names = ("density", "overlap_ratio", "densification_ratio", "skewness_ratio")
    return Characteristics(*(or_nan(recorded[name]) for name in names))


def read_candidates(recorded: Iterable[Mapping[str, Any]] | None) -> tuple[Candidate, ...]:
    """Read the schemes that were considered, in the order in which they stand."""
    return tuple(
        Candidate(str(one["scheme"]), float(one["bytes"]), float(one["messages"]), float(one["seconds"]))
        for one in recorded or ()
    )


def or_nan(value: float | None) -> float:
    """Read a number that may be missing."""
    return math.nan if value is None else float(value)


def _shaped(values: object, *shape: int) -> FloatArray:
    array = np.asarray(values, dtype=np.float64)
    if array.shape != shape or not np.isfinite(array).all():
        raise ValueError(f"expected {shape} finite numbers, but got shape {array.shape}")
    return array
