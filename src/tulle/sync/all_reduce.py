"""`tulle.sync.all_reduce`: the all-reduce that sparse gradients lack, on gloo and nccl alike (pytorch#22400)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeVar, cast

import torch
from torch import Tensor

from tulle.comm import all_gather, probe, raise_together
from tulle.comm import all_reduce as reduce_dense
from tulle.errors import GradientError, PlanError
from tulle.mesh import Axis
from tulle.rows import RowSparse
from tulle.sync.reduce import DENSE, count, sum_gradients
from tulle.sync.schemes import AUTO, SCHEMES, check_scheme, choose
from tulle.sync.table import Table

G = TypeVar("G", RowSparse, Tensor)
_OPERATIONS = ("mean", "sum")
_OPTIONS = [(scheme, operation) for scheme in (AUTO, *SCHEMES) for operation in _OPERATIONS]
_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_DIMENSIONS = 8
_REFUSED = -9


@torch.no_grad()
def all_reduce(grad: G, axis: Axis, *, scheme: str = AUTO, op: Literal["mean", "sum"] = "mean") -> G:
    """Reduce a gradient over an axis. Every rank of the axis must call it.

    Ranks may hold different rows, any number of them, none too. If one rank gives a dense tensor and another rows
    of the same table, the result is dense on all ranks. The argument is left as it is.

    Args:
        grad: `RowSparse`, a sparse COO tensor with `sparse_dim` 1, or a dense tensor.
        axis: Whose ranks take part, `mesh["data"]` say.
        scheme: For rows, `"allgather"`, `"densify"`, or `"auto"`: the one of least predicted cost, by the rows that
            the ranks hold and the measured network.
        op: `"mean"` over the ranks, as DDP does, or `"sum"`.

    Returns:
        The reduced gradient, of the kind that was given; rows are coalesced.

    Raises:
        PlanError: If the scheme or the operation is unknown, or not the same on all ranks.
        GradientError: On every rank, if a gradient is of another kind, or shapes or dtypes differ between ranks.

    Source: the schemes are those of Zen (OSDI'25, section 3) and *Densifying Assumed-sparse Tensors* (2019).

    Example:
        >>> import torch, tulle
        >>> mesh = tulle.init(data=-1)
        >>> grad = tulle.RowSparse(torch.tensor([2, 2]), torch.ones(2, 3), num_rows=5)
        >>> tulle.sync.all_reduce(grad, mesh["data"], op="sum").values.tolist()
        [[2.0, 2.0, 2.0]]
    """
    check_scheme(scheme)
    if op not in _OPERATIONS:
        raise PlanError(f"unknown operation {op!r}, expected one of {', '.join(_OPERATIONS)}")
    local, refusal = _read(grad)
    counts = _announce(local, refusal, (scheme, op), axis)
    factor = 1.0 / axis.size if op == "mean" else 1.0
    if all(held == DENSE for held in counts):
        assert isinstance(local, Tensor), "this rank announced a dense tensor"
        return cast("G", reduce_dense((local * factor).contiguous(), axis, label="gradient").wait())
    assert local is not None, "a refused gradient was raised by all ranks"
    values = local.values if isinstance(local, RowSparse) else local
    table = Table("gradient", local.shape[0], local.shape[1], values.dtype, values.device)
    if scheme == AUTO and DENSE not in counts:
        scheme = choose(table.characteristics(counts), probe(axis), axis.size).scheme
    scaled = local.scaled(factor) if isinstance(local, RowSparse) else local * factor
    [total] = sum_gradients([scaled], [table], [[held] for held in counts], [scheme], axis).wait()
    is_coo = isinstance(grad, Tensor) and grad.layout == torch.sparse_coo
    return cast("G", total.to_sparse_coo() if is_coo and isinstance(total, RowSparse) else total)


def _read(grad: RowSparse | Tensor) -> tuple[RowSparse | Tensor | None, GradientError | None]:
    """The gradient as coalesced rows or a dense tensor, or why it is refused."""
    if isinstance(grad, RowSparse):
        return grad.coalesce(), None
    if not isinstance(grad, Tensor):
        return None, GradientError(
            f"tulle.sync.all_reduce was given a {type(grad).__name__}, "
            "expected a RowSparse, a sparse COO tensor or a dense tensor"
        )
    if grad.dtype not in _DTYPES or grad.dim() > _DIMENSIONS:
        return None, GradientError(
            f"tulle.sync.all_reduce was given {grad.dtype} of {grad.dim()} dimensions, "
            f"expected a floating-point dtype and at most {_DIMENSIONS} dimensions"
        )
    if grad.layout == torch.strided:
        return grad.detach(), None
    try:
        return RowSparse.from_tensor(grad.detach()).coalesce(), None
    except GradientError as refusal:
        return None, refusal


def _announce(
    local: RowSparse | Tensor | None, refusal: GradientError | None, options: tuple[str, str], axis: Axis
) -> list[int]:
    """What each rank holds, rows or `DENSE`; raises on all ranks alike if gradients or options do not fit together."""
    asked = _OPTIONS.index(options)
    description = [_REFUSED, asked] + [0] * (_DIMENSIONS + 2)
    if local is not None:
        dtype = local.values.dtype if isinstance(local, RowSparse) else local.dtype
        shape = [*local.shape, *[0] * (_DIMENSIONS - len(local.shape))]
        description = [count(local), asked, _DTYPES.index(dtype), len(local.shape), *shape]
    mine = torch.tensor(description, dtype=torch.int64).to(axis.device)
    heard: list[list[int]] = all_gather(mine, axis, label="gradient's shape").wait().tolist()
    held = [rank[0] for rank in heard]
    if _REFUSED in held:
        raise_together(refusal, axis, label="gradient's kind")
    for rank, other in enumerate(heard):
        if other[1] != heard[0][1]:
            raise PlanError(
                f"tulle.sync.all_reduce was called with scheme and op {_OPTIONS[other[1]]} on rank {rank} of axis "
                f"{axis.name!r} and {_OPTIONS[heard[0][1]]} on rank 0: give the same on every rank"
            )
    _check_alike([rank[2:] for rank in heard], axis)
    return held


def _check_alike(heard: Sequence[Sequence[int]], axis: Axis) -> None:
    for rank, other in enumerate(heard):
        if list(other) != list(heard[0]):
            raise GradientError(
                f"tulle.sync.all_reduce was given {_say(other)} on rank {rank} of axis {axis.name!r} and "
                f"{_say(heard[0])} on rank 0: give the same shape and dtype on every rank"
            )


def _say(description: Sequence[int]) -> str:
    dtype, dimensions, *shape = description
    return f"{str(_DTYPES[dtype]).removeprefix('torch.')} {shape[:dimensions]}"
