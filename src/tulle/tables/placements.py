"""The registry of placements: how a table can be split over the ranks of an axis, and what that costs."""

from __future__ import annotations

from types import ModuleType

import tulle.tables.columns as columns
import tulle.tables.rows as rows
from tulle.mesh import Axis
from tulle.tables.split import ColumnSplit, RowSplit, Split

PLACEMENTS: dict[str, ModuleType] = {"rows": rows, "columns": columns}
"""Modules with a `cost`, by the name that plans use."""


def split_as(placement: str, name: str, shape: tuple[int, int], axis: Axis) -> Split:
    """The split of a table of `shape`, `(rows, width)`, by a placement's name."""
    kind = {"rows": RowSplit, "columns": ColumnSplit}[placement]
    return kind(name, *shape, axis)
