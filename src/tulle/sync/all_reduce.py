"""`tulle.sync.all_reduce`: the all-reduce that sparse gradients lack, on gloo and nccl alike (pytorch#22400)."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal, TypeVar, cast

import torch
from torch import Tensor

from tulle.comm import all_gather, probe, raise_together
from tulle.comm import all_reduce as reduce_dense
from tulle.errors import GradientError, PlanError, TulleError
from tulle.mesh import Axis, check_axis
from tulle.rows import RowSparse
from tulle.sync.characteristics import gather_presence
from tulle.sync.chooser import Chooser
from tulle.sync.given import check_device, check_indices
from tulle.sync.reduce import DENSE, Gradient, count, sum_gradients
from tulle.sync.schemes import AUTO, FLAT, HIERARCHICAL, SCHEMES, check_scheme
from tulle.sync.table import Table, WireDtype, as_wire_dtype

G = TypeVar("G", RowSparse, Tensor)
_OPERATIONS: tuple[str, ...] = ("mean", "sum")
_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_PAIRS = [f"{HIERARCHICAL}:{inside}+{across}" for inside, across in product(FLAT, FLAT)]
_Asked = tuple[str, str, torch.dtype | None]
_OPTIONS: list[_Asked] = [*product((AUTO, *SCHEMES, *_PAIRS), _OPERATIONS, (None, *_DTYPES))]
_BY = "tulle.sync.all_reduce"
_DIMENSIONS = 8
_REFUSED = -9
_MOST_KINDS = 1024
"""Of so many kinds of gradients (shapes and dtypes) what was chosen is kept: those of ever other shapes never end."""


@torch.no_grad()
def all_reduce(
    grad: G,
    axis: Axis,
    *,
    scheme: str = AUTO,
    op: Literal["mean", "sum"] = "mean",
    wire_dtype: WireDtype = None,
) -> G:
    """Average or sum a gradient over the ranks of an axis. Every rank of the axis must call it.

    Each rank may hold other rows than the others, and any number of them, also none. If one rank gives a dense tensor
    and another rows of the same table, the result is dense on all ranks. The argument is left as it is.

    Args:
        grad: `RowSparse`, a sparse COO tensor (of rows, as embeddings give, with `sparse_dim` 1; of elements, as top-k
            gives; or in between), or a dense tensor.
        axis: Whose ranks take part, `mesh["data"]` say.
        scheme: How sparse gradients are sent, one of `tulle.sync.SCHEMES`. `"auto"` takes the one that is predicted to
            be fastest, from the number of rows that the ranks hold and the measured network, and looks again when that
            number has changed clearly.
        op: `"mean"` over the ranks, as DDP does, or `"sum"`.
        wire_dtype: The dtype in which values are sent. `"bf16"`, say, sends fewer bytes and rounds the values. None
            sends them in their own.

    Returns:
        The reduced gradient, of the kind that was given; rows are coalesced. Bitwise the same on all ranks.

    Raises:
        MeshError: If `axis` is no `Axis`.
        PlanError: On every rank, if scheme, operation or dtype is unknown on any, or not the same on all.
        GradientError: On every rank, if a gradient is of another kind or on another device than the axis, or shapes or
            dtypes differ between ranks.

    Source: the schemes are those of Zen (OSDI'25, section 3) and *Densifying Assumed-sparse Tensors* (2019).

    Example:
        >>> import torch, tulle
        >>> mesh = tulle.init(data=-1)
        >>> grad = tulle.RowSparse(torch.tensor([2, 2]), torch.ones(2, 3), num_rows=5)
        >>> tulle.sync.all_reduce(grad, mesh["data"], op="sum").values.tolist()
        [[2.0, 2.0, 2.0]]
    """
    check_axis(axis, by="tulle.sync.all_reduce")
    asked, refused = _asked(scheme, op, wire_dtype)
    local, refusal = read(grad, axis)
    counts, sparse_dim = announce(local, refused or refusal, asked, axis)
    assert local is not None, "a refused gradient was raised by all ranks"
    assert asked is not None, "and so was a refused scheme"
    table = local.table(sparse_dim, asked[-1])
    mine = local.scaled(1.0 / axis.size if op == "mean" else 1.0, table)
    if DENSE in counts:
        dense = mine.to_dense() if isinstance(mine, RowSparse) else mine
        total = reduce_dense(table.to_wire(dense), axis, label=table.name).wait()
        return cast("G", table.from_wire(total).view(local.shape))
    if scheme == AUTO:
        chooser = _chooser_of((local.shape, local.sparse_dim, table.dtype, table.wire_dtype), axis)
        scheme = chosen(chooser, local, table, counts, axis)
    [total] = sum_gradients([mine], [table], [[held] for held in counts], [scheme], axis).wait()
    return cast("G", as_given(grad, total, local.shape, sparse_dim))


@dataclass(frozen=True, slots=True, eq=False)
class Local:
    """This rank's gradient: rows of a matrix, or dense, and the shape that it came with."""

    gradient: RowSparse | Tensor
    shape: tuple[int, ...]
    sparse_dim: int
    """0 for a dense tensor."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the gradient's values."""
        return self.gradient.dtype if isinstance(self.gradient, Tensor) else self.gradient.values.dtype

    def table(self, sparse_dim: int, wire_dtype: torch.dtype | None) -> Table:
        """The matrix whose rows are what the leading `sparse_dim` dimensions index."""
        device = self.gradient.device if isinstance(self.gradient, Tensor) else self.gradient.values.device
        num_rows, width = math.prod(self.shape[:sparse_dim]), math.prod(self.shape[sparse_dim:])
        return Table("gradient", num_rows, width, self.dtype, device, wire_dtype)

    def scaled(self, factor: float, table: Table) -> RowSparse | Tensor:
        """The gradient times a factor; a dense one in the shape of the table."""
        if isinstance(self.gradient, RowSparse):
            return self.gradient.scaled(factor)
        return (self.gradient * factor).reshape(table.num_rows, table.width)


def _asked(scheme: str, op: str, wire_dtype: WireDtype) -> tuple[_Asked | None, PlanError | None]:
    """Scheme, operation and dtype on the wire, or why they are refused."""
    try:
        check_scheme(scheme)
        if op not in _OPERATIONS:
            raise PlanError(f"unknown operation {op!r}, expected one of {', '.join(_OPERATIONS)}")
        return (scheme, op, as_wire_dtype(wire_dtype)), None
    except PlanError as refused:
        return None, refused


def read(grad: RowSparse | Tensor, axis: Axis) -> tuple[Local | None, GradientError | None]:
    """The gradient as coalesced rows or a dense tensor, or why it is refused."""
    if not isinstance(grad, RowSparse | Tensor):
        return None, GradientError(
            f"tulle.sync.all_reduce was given a {type(grad).__name__}, "
            "expected a RowSparse, a sparse COO tensor or a dense tensor"
        )
    dtype = grad.dtype if isinstance(grad, Tensor) else grad.values.dtype
    if dtype not in _DTYPES or len(grad.shape) > _DIMENSIONS:
        return None, GradientError(
            f"tulle.sync.all_reduce was given {dtype} of {len(grad.shape)} dimensions, "
            f"expected one of {', '.join(map(str, _DTYPES))} and at most {_DIMENSIONS} dimensions"
        )
    try:
        check_device(grad, axis, by=_BY)
    except GradientError as refused:
        return None, refused
    if isinstance(grad, RowSparse):
        return Local(grad.coalesce(), grad.shape, 1), None
    if grad.layout == torch.strided:
        return Local(grad.detach(), tuple(grad.shape), 0), None
    if grad.layout != torch.sparse_coo or grad.sparse_dim() == 0:
        kind = f"{grad.layout} tensor{' without a sparse dimension' if grad.layout == torch.sparse_coo else ''}"
        return None, GradientError(
            f"tulle.sync.all_reduce was given a {kind}, expected a dense one or sparse COO: "
            "convert it with tensor.to_sparse()"
        )
    try:
        if grad.device.type == "cpu":  # elsewhere looking for one would be waited for
            check_indices(grad, by=_BY)
    except GradientError as refused:
        return None, refused
    return Local(_as_rows(grad.detach()), tuple(grad.shape), grad.sparse_dim()), None


def _as_rows(grad: Tensor) -> RowSparse:
    """A sparse COO tensor of any dimensions as rows of a matrix."""
    numbers = grad._indices()[0]
    for dimension in range(1, grad.sparse_dim()):
        numbers = numbers * grad.shape[dimension] + grad._indices()[dimension]
    num_rows, width = math.prod(grad.shape[: grad.sparse_dim()]), math.prod(grad.shape[grad.sparse_dim() :])
    values = grad._values().reshape(len(numbers), width)
    return RowSparse.trusted(numbers, values, num_rows, is_coalesced=grad.is_coalesced()).coalesce()


def as_given(grad: RowSparse | Tensor, total: Gradient, shape: Sequence[int], sparse_dim: int) -> Gradient:
    """The sum in the kind that was given, or dense if any rank's gradient was."""
    if isinstance(total, Tensor):
        return total.view(*shape)
    if total is None or isinstance(grad, RowSparse):
        return total
    if sparse_dim == 1 and len(shape) == 2:
        return total.to_sparse_coo()
    indices = torch.stack(torch.unravel_index(total.indices, tuple(shape[:sparse_dim])))
    values = total.values.reshape(len(total.indices), *shape[sparse_dim:])
    return torch.sparse_coo_tensor(indices, values, tuple(shape), is_coalesced=True, check_invariants=False)


def _chooser_of(kind: Hashable, axis: Axis) -> Chooser:
    """What chooses for gradients of one kind, as long as it is one of those that came last. All ranks forget alike."""
    choosers: dict[Hashable, Chooser] = axis.kept.setdefault(all_reduce, {})
    chooser = choosers.pop(kind, None) or Chooser(probe(axis), axis.size)
    choosers[kind] = chooser  # the last one
    if len(choosers) > _MOST_KINDS:
        del choosers[next(iter(choosers))]
    return chooser


def chosen(chooser: Chooser, local: Local, table: Table, counts: Sequence[int], axis: Axis) -> str:
    """The scheme in force for rows of which each rank holds so many. Every rank must call it."""
    if chooser.is_due(counts):
        assert isinstance(local.gradient, RowSparse), "no rank announced a dense tensor"
        [presence] = gather_presence([local.gradient.indices.long()], [table], [[held] for held in counts], axis)
        chooser.choose([table.characteristics(counts, presence)])
    assert chooser.scheme is not None, "the first choice is always due"
    return chooser.scheme


def announce(
    local: Local | None,
    refusal: TulleError | None,
    asked: _Asked | None,
    axis: Axis,
) -> tuple[list[int], int]:
    """What each rank holds, rows or `DENSE`, and the sparse dimensions; raises on all ranks alike what does not fit."""
    options = 0 if asked is None else _OPTIONS.index(asked)
    description = [_REFUSED, options, 0] + [0] * (_DIMENSIONS + 2)
    if local is not None and refusal is None:
        shape = [*local.shape, *[0] * (_DIMENSIONS - len(local.shape))]
        kind = [_DTYPES.index(local.dtype), len(local.shape)]
        description = [count(local.gradient), options, local.sparse_dim, *kind, *shape]
    mine = torch.tensor(description, dtype=torch.int64).to(axis.device)
    heard: list[list[int]] = all_gather(mine, axis, label="gradient's shape").wait().tolist()
    held = [rank[0] for rank in heard]
    if _REFUSED in held:
        raise_together(refusal, axis, label="gradient's kind, and how it is to be reduced")
    for rank, other in enumerate(heard):
        if other[1] != heard[0][1]:
            raise PlanError(
                f"tulle.sync.all_reduce was called with {_say_options(other[1])} on rank {rank} of axis "
                f"{axis.name!r} and {_say_options(heard[0][1])} on rank 0: give the same on every rank"
            )
    _check_alike([rank[3:] for rank in heard], axis)
    sparse_dims = {rank[2] for rank in heard if rank[2]}
    if len(sparse_dims) > 1:
        raise GradientError(
            f"tulle.sync.all_reduce was given sparse tensors with sparse_dim {sorted(sparse_dims)} on the ranks of "
            f"axis {axis.name!r}: give the same on every rank"
        )
    return held, sparse_dims.pop() if sparse_dims else 0


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


def _say_options(number: int) -> str:
    scheme, operation, wire_dtype = _OPTIONS[number]
    lossy = f", wire_dtype {str(wire_dtype).removeprefix('torch.')}" if wire_dtype else ""
    return f"scheme {scheme!r}, op {operation!r}{lossy}"
