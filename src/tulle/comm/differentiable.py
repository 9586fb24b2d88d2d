"""Collectives with gradients: *f*, *g*, gather, scatter, reduce-scatter, all-to-all and halos as functions of autograd.

Each is linear, and its backward is the one that stands opposite; so gradients of gradients come out too.

    forward                                    backward
    enter           x on every rank            leave
    leave           sum over ranks             enter
    gather          parts end to end           scatter, or reduce_scatter
    scatter         own part                   gather
    reduce_scatter  own part of the sum        gather
    exchange        split here, join there     exchange, the other way
    halo            own part and its borders   borders back to their owners, added up

`enter` and `leave` are the *f* and *g* of Shoeybi et al., *Megatron-LM* (2019), section 3. `torch.distributed`'s own
functional all-reduce is neither: its backward reduces again, which is right only where every rank's loss is a part of
a sum. Here every rank has the same loss, and ranks that hold the same values hold the same gradients.

A tensor that has nothing to send, on an axis of one rank, comes back as it is.
"""

from __future__ import annotations

from typing import Any, Literal, cast

import torch
from torch import Tensor

from tulle.comm.collectives import all_gather, all_reduce
from tulle.comm.eager import eager
from tulle.comm.parts import all_to_all_parts
from tulle.comm.scratch import release
from tulle.errors import ModelError
from tulle.mesh import Axis


def enter(tensor: Tensor, axis: Axis, *, label: str) -> Tensor:
    """*f*: what all ranks hold alike enters work that is split; the gradient is summed. Every rank must call it.

    Args:
        tensor: Of any shape, equal on all ranks of the axis.
        axis: Whose ranks each do a part of the work that follows.
        label: What it is for: counters, timeline and errors name it.
    """
    if axis.size == 1 or not (torch.is_grad_enabled() and tensor.requires_grad):
        return tensor
    return _applied(_Enter, tensor, axis, label)


def leave(tensor: Tensor, axis: Axis, *, label: str) -> Tensor:
    """*g*: the sum of all ranks' tensors, on every rank; the gradient goes to each as it is. Every rank must call it.

    Args:
        tensor: This rank's part of the sum, of any shape; it is not modified.
        axis: Whose ranks hold the parts.
        label: What it is for.

    Example:
        >>> import torch, tulle
        >>> axis = tulle.init(data=-1)["data"]
        >>> part = torch.ones(2, requires_grad=True)
        >>> leave(enter(part, axis, label="doc"), axis, label="doc").tolist()
        [1.0, 1.0]
    """
    return tensor if axis.size == 1 else _applied(_Leave, tensor, axis, label)


def gather(
    tensor: Tensor, axis: Axis, *, dim: int, label: str, backward: Literal["slice", "reduce_scatter"] = "slice"
) -> Tensor:
    """All ranks' tensors end to end along a dimension. Every rank of the axis must call it.

    Args:
        tensor: This rank's part, of one shape on all ranks.
        axis: Whose ranks hold the parts.
        dim: The dimension along which they lie, in the order of ranks.
        label: What it is for.
        backward: `"slice"` if the gradient is equal on all ranks: each takes its part, nothing travels.
            `"reduce_scatter"` if each rank's gradient is a part of a sum: *f* and the gathering in one.
    """
    if axis.size == 1:
        return tensor
    return _applied(_Gather if backward == "slice" else _GatherToSum, tensor, axis, label, dim % tensor.dim())


def scatter(tensor: Tensor, axis: Axis, *, dim: int, label: str) -> Tensor:
    """This rank's part of what all ranks hold alike; the gradient is gathered. Every rank of the axis must call it.

    Raises:
        ModelError: If the dimension does not divide evenly.
    """
    if axis.size == 1:
        return tensor
    return _applied(_Scatter, tensor, axis, label, _divisible("scatter", tensor, axis, dim, label))


def reduce_scatter(tensor: Tensor, axis: Axis, *, dim: int, label: str) -> Tensor:
    """This rank's part of the sum of all ranks' tensors; the gradient is gathered. Every rank of the axis must call it.

    The parts go straight to the rank that sums them, in the order of ranks: half the bytes of an all-reduce. (gloo's
    own reduce-scatter is one all-reduce a rank.)

    Raises:
        ModelError: If the dimension does not divide evenly.
    """
    if axis.size == 1:
        return tensor
    return _applied(_ReduceScatter, tensor, axis, label, _divisible("reduce_scatter", tensor, axis, dim, label))


def exchange(tensor: Tensor, axis: Axis, *, split_dim: int, join_dim: int, label: str) -> Tensor:
    """All-to-all: a tensor split along `join_dim` becomes one split along `split_dim`. Every rank must call it.

    Args:
        tensor: This rank's part of one that is split along `join_dim`.
        axis: Whose ranks hold the parts.
        split_dim: The dimension that is whole now and split afterwards.
        join_dim: The dimension that is split now and whole afterwards.
        label: What it is for.

    Raises:
        ModelError: If `split_dim` does not divide evenly.
    """
    if axis.size == 1:
        return tensor
    split_dim = _divisible("exchange", tensor, axis, split_dim, label)
    return _applied(_Exchange, tensor, axis, label, split_dim, join_dim % tensor.dim())


def halo(tensor: Tensor, axis: Axis, *, dim: int, before: int, after: int, label: str) -> Tensor:
    """This rank's part with what borders on it: entries of its neighbours, and zeros beyond the ends.

    Every rank of the axis must call it.

    Args:
        tensor: This rank's part, of one shape on all ranks.
        axis: Whose ranks hold the parts.
        dim: The dimension along which they lie.
        before: Entries wanted before the part; they may come from several ranks.
        after: Entries wanted after it.
        label: What it is for.
    """
    if axis.size == 1:
        return torch.nn.functional.pad(tensor.movedim(dim, -1), (before, after)).movedim(-1, dim)
    return _applied(_Halo, tensor, axis, label, dim % tensor.dim(), before, after)


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, axis: Axis, label: str) -> Tensor:
        ctx.about = axis, label
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return _applied(_Leave, gradients[0], *ctx.about), None, None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, axis: Axis, label: str) -> Tensor:
        ctx.about = axis, label
        return all_reduce(tensor.clone(memory_format=torch.contiguous_format), axis, label=label).wait()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return _applied(_Enter, gradients[0], *ctx.about), None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, axis: Axis, label: str, dim: int) -> Tensor:
        ctx.about = axis, label, dim
        return _joined(all_gather(tensor.contiguous(), axis, label=label).wait(), dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return _applied(_Scatter, gradients[0], *ctx.about), None, None, None


class _GatherToSum(_Gather):
    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return _applied(_ReduceScatter, gradients[0], *ctx.about), None, None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, axis: Axis, label: str, dim: int) -> Tensor:
        ctx.about = axis, label, dim
        return tensor.chunk(axis.size, dim)[axis.rank].clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return _applied(_Gather, gradients[0], *ctx.about), None, None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, axis: Axis, label: str, dim: int) -> Tensor:
        ctx.about = axis, label, dim
        parts = _exchanged(tensor, axis, label, dim)
        total = parts.sum(0, dtype=parts.dtype)
        release(parts, axis)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return _applied(_GatherToSum, gradients[0], *ctx.about), None, None, None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, axis: Axis, label: str, split_dim: int, join_dim: int) -> Tensor:
        ctx.about = axis, label, join_dim, split_dim
        parts = _exchanged(tensor, axis, label, split_dim)
        joined = _joined(parts, join_dim)
        if joined.data_ptr() != parts.data_ptr():
            release(parts, axis)
        return joined

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        return _applied(_Exchange, gradients[0], *ctx.about), None, None, None, None


class _Halo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, axis: Axis, label: str, dim: int, before: int, after: int) -> Tensor:
        rows = tensor.movedim(dim, 0)
        ctx.about = axis, label, dim, before, after
        lent = [_overlap(to, axis.rank, len(rows), before, after) for to in range(axis.size)]
        borrowed = [_overlap(axis.rank, owner, len(rows), before, after) for owner in range(axis.size)]
        begin = axis.rank * len(rows)
        parts = [rows[lo - begin : max(lo, hi) - begin].contiguous() for lo, hi in lent]
        there = all_to_all_parts(parts, [max(0, hi - lo) for lo, hi in borrowed], axis, label=label).wait()
        missing = max(0, before - begin), max(0, begin + len(rows) + after - axis.size * len(rows))
        ends = [there.new_zeros(length, *there.shape[1:]) for length in missing]
        return torch.cat([ends[0], there, ends[1]]).movedim(0, dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        return _applied(_HaloBack, gradients[0], *ctx.about), None, None, None, None, None


class _HaloBack(torch.autograd.Function):
    """What borders on parts goes back to its owners, who add it up."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, axis: Axis, label: str, dim: int, before: int, after: int) -> Tensor:
        rows = tensor.movedim(dim, 0)
        ctx.about = axis, label, dim, before, after
        length = len(rows) - before - after
        begin = axis.rank * length
        borrowed = [_overlap(axis.rank, owner, length, before, after) for owner in range(axis.size)]
        lent = [_overlap(to, axis.rank, length, before, after) for to in range(axis.size)]
        shift = before - begin
        parts = [rows[lo + shift : max(lo, hi) + shift].contiguous() for lo, hi in borrowed]
        lengths = [max(0, hi - lo) for lo, hi in lent]
        back = all_to_all_parts(parts, lengths, axis, label=label).wait().split(lengths)
        total = torch.zeros(length, *rows.shape[1:], dtype=rows.dtype, device=rows.device)
        for part, (lo, _) in zip(back, lent, strict=True):
            if len(part):
                total[lo - begin : lo - begin + len(part)] += part
        return total.movedim(0, dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        return _applied(_Halo, gradients[0], *ctx.about), None, None, None, None, None


def _overlap(of: int, owner: int, length: int, before: int, after: int) -> tuple[int, int]:
    """Of the entries that rank `of` wants, the first and the end of those that `owner` holds."""
    return max(of * length - before, owner * length), min((of + 1) * length + after, (owner + 1) * length)


def _applied(function: type[torch.autograd.Function], tensor: Tensor, axis: Axis, label: str, *more: int) -> Tensor:
    return (_untraced if torch.compiler.is_compiling() else _done)(function, tensor, axis, label, *more)


@eager
def _untraced(function: type[torch.autograd.Function], tensor: Tensor, axis: Axis, label: str, *more: int) -> Tensor:
    """What is sent is not to be traced: the compiler would take its size for a symbol, and send while it looks."""
    return _done(function, tensor, axis, label, *more)


def _done(function: type[torch.autograd.Function], tensor: Tensor, axis: Axis, label: str, *more: int) -> Tensor:
    if cast("Any", torch._C)._are_functorch_transforms_active():
        raise ModelError(
            f"a transform of torch.func (vmap, grad, jvp, ...) met {label}, which is split over axis {axis.name!r}, "
            "and does not know what is sent: take gradients, and those of gradients, by torch.autograd.grad, or leave "
            "it whole"
        )
    return function.apply(tensor, axis, label, *more)


def _exchanged(tensor: Tensor, axis: Axis, label: str, dim: int) -> Tensor:
    """What each rank has for this one: `[size, ...]`."""
    parts = [part.contiguous().unsqueeze(0) for part in tensor.chunk(axis.size, dim)]
    return all_to_all_parts(parts, [1] * axis.size, axis, label=label).wait()


def _joined(parts: Tensor, dim: int) -> Tensor:
    """Lay `[size, ...]` end to end along a dimension; of one entry each, `flatten` alone would give a strided view."""
    return parts.movedim(0, dim).flatten(dim, dim + 1).contiguous()


def _divisible(what: str, tensor: Tensor, axis: Axis, dim: int, label: str) -> int:
    dim %= tensor.dim()
    if tensor.shape[dim] % axis.size:
        raise ModelError(
            f"{what} of {label} was given a tensor of shape {tuple(tensor.shape)}, whose dimension {dim} does not "
            f"divide evenly among the {axis.size} ranks of axis {axis.name!r}: pad it, or split another dimension"
        )
    return dim
