"""The registry of placements: how a table can be split over the ranks of an axis, and what that costs."""

from __future__ import annotations

from types import ModuleType

import tulle.tables.columns as columns
import tulle.tables.rows as rows
from tulle.mesh import Axis
from tulle.tables.split import ColumnSplit, RowSplit, Split

COLUMNS = "columns"
_KINDS: dict[str, type[Split]] = {"rows": RowSplit, COLUMNS: ColumnSplit}
PLACEMENTS: dict[str, ModuleType] = {"rows": rows, COLUMNS: columns}
"""Modules with a `cost`, by the name that plans use."""


def split_as(placement: str, name: str, shape: tuple[int, int], axis: Axis) -> Split:
    """The split of a table of `shape`, `(rows, width)`, by a placement's name."""
    return _KINDS[placement](name, *shape, axis)


def placement_of(split: Split) -> str:
    """The name of the placement by which a table is split."""
    return next(name for name, kind in _KINDS.items() if isinstance(split, kind))
