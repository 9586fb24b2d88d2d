"""`rows_by_number`: which rows of a table an index takes, as a lookup would, and what it takes of these.

    weight[ids],  weight[ids, :8],  weight[[3, 5]],  weight.index_select(0, ids),  weight[MASK]

The last is a view of the table, by which a loop may write in it (`weight[0].zero_()`) where it has no gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor

_SELECTS = frozenset({Tensor.index_select, torch.index_select})


@dataclass(frozen=True, slots=True, eq=False)
class RowsByNumber:
    """Rows that an index takes.

    Args:
        ids: Their numbers.
        rest: What it takes of the rows, once these are looked up, as an index of them; none for all as they are.
        is_view: Whether what it gives is a view of the table, and no copy.
    """

    ids: Tensor
    rest: tuple[Any, ...] = ()
    is_view: bool = False

    def of(self, rows: Tensor) -> Tensor:
        """What the index gives, if `rows`, of shape `[*ids.shape, width]`, are those that lie at the numbers."""
        return rows[self.rest] if self.rest else rows


def rows_by_number(
    func: Callable[..., Any], args: Sequence[Any], keywords: Mapping[str, Any], num_rows: int | None = None
) -> RowsByNumber | None:
    """The rows that a function takes from its first argument by their numbers, if that is what it does.

    Args:
        func: A function of torch.
        args: Its arguments.
        keywords: Those given by name.
        num_rows: Of the first argument, if its shape does not tell.

    Example:
        >>> table, ids = torch.eye(3), torch.tensor([2, 0])
        >>> for index in (ids, (ids, slice(2)), [-1], (slice(2), 1)):
        ...     found = rows_by_number(Tensor.__getitem__, [table, index], {})
        ...     print(found and found.ids, found and torch.equal(found.of(table[found.ids]), table[index]))
        tensor([2, 0]) True
        tensor([2, 0]) True
        tensor([2]) True
        None None
        >>> rows_by_number(torch.index_select, [table, -2], {"index": ids}).ids
        tensor([2, 0])
    """
    if func is Tensor.__getitem__:
        first, *rest = args[1] if isinstance(args[1], tuple) and args[1] else (args[1],)
        return _indexed(args[0], first, rest, num_rows)
    if func in _SELECTS and keywords.get("dim", (*args, None)[1]) in (0, -args[0].dim()):
        found = keywords.get("index", args[-1])
        return RowsByNumber(found) if _are_numbers(found) and found.dim() else None
    return None


def _indexed(table: Tensor, first: Any, rest: Sequence[Any], num_rows: int | None) -> RowsByNumber | None:
    """The rows of an index, of which one after the first is for columns."""
    if not all(isinstance(one, slice | int) or one is ... for one in rest):
        return None
    if _are_whole(found := first if isinstance(first, list) else [first]):
        rows = table.shape[0] if num_rows is None else num_rows
        numbers = torch.tensor([one if one >= 0 else one + rows for one in found], device=table.device)
        first = numbers if isinstance(first, list) else numbers[0]
    if not _are_numbers(first):
        return None
    if not first.dim():
        return RowsByNumber(first.reshape(1), (0, *rest), is_view=True)
    return RowsByNumber(first, (*(slice(None),) * first.dim(), *rest) if rest else ())


def _are_numbers(found: Any) -> TypeGuard[Tensor]:
    return isinstance(found, Tensor) and found.dtype in (torch.int32, torch.int64)


def _are_whole(found: Sequence[Any]) -> bool:
    return bool(found) and all(isinstance(one, int) and not isinstance(one, bool) for one in found)
