"""Numbers of rows that a step was told by a sparse gradient: what it takes by these is this rank's, as the rows are.

rows = gradient._indices()[0]
sums.index_add_(0, rows, gradient._values().pow(2).mean(1))  # from here on of a part, as it has numbers of one
parameter.index_add_(0, rows, gradient._values() / sums[rows].sqrt()[:, None])
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, UntypedStorage, strided

_told = dict[int, UntypedStorage]()
"""Memory of what was told within the step that runs, by its address; held, so that nothing else lies there."""


def tell(numbers: Tensor) -> Tensor:
    """Give a step the numbers of a gradient's rows on this rank, and know them until it ends."""
    memory = numbers.untyped_storage()
    _told[memory.data_ptr()] = memory
    return numbers


def forget() -> None:
    """A step has ended: another's rows lie elsewhere."""
    _told.clear()


def goes_by_told(args: Sequence[Any], keywords: Mapping[str, Any]) -> bool:
    """Whether an operation goes along its first argument's rows by numbers that the step was told.

    Args:
        args: Of an index (`sums[rows]`, `sums[rows] = values`), or of a function that takes dimension and numbers.
        keywords: Of it.
    """
    index = args[1] if len(args) > 1 else keywords.get("dim")
    if isinstance(index, int) and not isinstance(index, bool):
        rows = keywords.get("index", args[2] if len(args) > 2 else None)
        return index == 0 and _is_told(rows)
    return _is_told(index[0] if isinstance(index, tuple) and index else index)


def _is_told(rows: object) -> bool:
    return isinstance(rows, Tensor) and rows.layout == strided and rows.untyped_storage().data_ptr() in _told
