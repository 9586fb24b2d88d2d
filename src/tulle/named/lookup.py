"""Lookup: picks entries along a dimension by index, where it is split by a masked local lookup."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from tulle.errors import ModelError
from tulle.named.dims import Dim, Dims, united
from tulle.named.placed import Local, label_of, record, shared_scope
from tulle.named.tensor import Tensor


def gather(table: Tensor, index: Tensor, over: Dim, *, label: str = "gather") -> Tensor:
    """Pick `table`'s entries along a dimension: the result has the dimensions of `index`, then the table's others.

    Dimensions that both have are walked through together. A rank that holds a part of the dimension looks up what it
    holds, and the rest comes as a pending sum.

    Args:
        table: Has the dimension `over`.
        index: Integers from 0 to below its size.
        over: The dimension that the indices count along.
        label: What its exchanges are counted under.

    Raises:
        ModelError: If the index is not of integers, or has the dimension itself, or counts beyond it (on a CPU, where
            that can be seen at once; by the rank that holds such an index).
        PlanError: If the operation is not legal in the layout.

    Example:
        >>> import torch
        >>> from tulle import named as tn
        >>> length, vocab, d = tn.dims(length=3, vocab=5, d=1)
        >>> table = tn.from_torch(torch.arange(5.0).view(5, 1), (vocab, d))
        >>> tn.gather(table, tn.from_torch(torch.tensor([4, 0, 4]), length), vocab).local.flatten().tolist()
        [4.0, 0.0, 4.0]
    """
    scope = shared_scope([table, index], "gather")
    table.place(over, "gather")
    if index.dtype not in (torch.int64, torch.int32) or over in index.dims:
        raise ModelError(
            f"gather over {over!r} was given {index!r} as its index, expected integers without that dimension"
        )
    check_indices(index.local, over, label)
    dims = united((over,), index.dims, table.dims)
    split = scope.axes(dims, "gather over")
    record("lookup", [table, index], dims, tuple(dim for dim in dims if dim != over))
    label = label_of(label, dims)
    axes = tuple(sorted(axis for axis in split if split[axis] not in table.dims))
    shared = tuple(dim for dim in index.dims if dim in table.dims)
    rest = tuple(dim for dim in table.dims if dim != over and dim not in shared)
    rows = _in_order(table.entered(axes, label), table.dims, (*shared, over, *rest))
    own = tuple(dim for dim in index.dims if dim not in shared)
    wanted = _in_order(index.local, index.dims, (*shared, *own))
    pending = tuple(sorted(scope.axes_of(over)))
    if not pending:
        picked = _picked(rows, wanted, len(shared))
    else:
        wanted = wanted - scope.offset(over)
        is_here = (wanted >= 0) & (wanted < scope.local_size(over))
        picked = _picked(rows, wanted.clamp(0, scope.local_size(over) - 1), len(shared))
        missing = ~is_here.view((*is_here.shape, *[1] * len(rest)))
        picked = picked.masked_fill(missing, 0)
    found = (*shared, *own, *rest)
    out = (*index.dims, *rest)
    return Tensor(_in_order(picked, found, out), out, pending)


def check_indices(index: Local, over: Dim, what: str) -> None:
    """Refuse indices beyond a dimension, of which each layout would make something else.

    Raises:
        ModelError: Naming the dimension.
    """
    if index.device.type != "cpu" or torch.compiler.is_compiling() or not index.numel():
        return
    least, most = (int(bound) for bound in index.aminmax())
    if least < 0 or most >= over.size:
        raise ModelError(
            f"{what} over {over!r} was given indices from {least} to {most}, expected 0 to {over.size - 1}: clamp what "
            "does not count, and leave out what it gives with tn.where"
        )


def _picked(rows: Local, wanted: Local, shared: int) -> Local:
    """`rows` is (*shared, over, *rest), `wanted` (*shared, *own): gives (*shared, *own, *rest)."""
    if shared == 0:
        if rows.dim() == 2:
            return F.embedding(wanted, rows)
        return rows.index_select(0, wanted.flatten()).view((*wanted.shape, *rows.shape[1:]))
    places: list[Local] = []
    for place in range(shared):
        along = torch.arange(rows.shape[place], device=rows.device)
        places.append(along.view([-1 if other == place else 1 for other in range(wanted.dim())]))
    return rows[(*places, wanted)]


def _in_order(local: Local, dims: Dims, out: Sequence[Dim]) -> Local:
    order = [dims.index(dim) for dim in out]
    return local if order == sorted(order) else local.permute(order)
