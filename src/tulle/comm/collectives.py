"""Typed collectives over `torch.distributed`: asynchronous, counted, and the same on gloo and nccl."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from tulle.comm.as_sent import as_bytes, as_sent
from tulle.comm.levels import LEAST_BYTES, begin_ring, levels
from tulle.comm.ordered import numbers_of, ordered
from tulle.comm.parts import AT_ONCE_BYTES, all_gather_parts
from tulle.comm.pending import Deferred, Exchange, Label, Pending, done, translated
from tulle.comm.through_memory import shared
from tulle.mesh import Axis
from tulle.parts import Reduction
from tulle.shared_memory import all_reduce as all_reduce_through


def all_reduce(tensor: Tensor, axis: Axis, *, label: Label, op: Reduction = "sum") -> Pending[Tensor]:
    """Reduce a tensor over the axis, in place. Every rank of the axis must call it.

    Args:
        tensor: Dense, of one shape and dtype on all ranks.
        axis: Whose ranks take part.
        label: What it is for: counters, timeline and errors name it.
        op: `"sum"`, `"max"` or `"min"`; the largest and the smallest are NaN where any is, as torch's are.
    """
    share = 2 * (axis.size - 1) / axis.size
    sent = tensor if op == "sum" or axis.size == 1 else ordered(tensor, op)
    sent = as_sent(sent.int() if sent.dtype == torch.int16 else sent)  # which no backend reduces
    exchange = Exchange("all-reduce", axis, label, round(share * sent.nbytes), 2 * (axis.size - 1))
    if axis.size == 1:
        return done(exchange, tensor)
    if (works := shared(axis)) is not None:
        return Pending(exchange, [all_reduce_through(works, sent, op)], lambda: _take(tensor, sent))
    if sent.nbytes >= LEAST_BYTES and (both := levels(axis)) is not None:
        return Pending(exchange, [both.all_reduce(sent, op)], lambda: _take(tensor, sent))
    with translated(exchange):
        work = begin_ring(sent, axis, op)
    return Pending(exchange, [work], lambda: _take(tensor, sent))


def _take(tensor: Tensor, sent: Tensor) -> Tensor:
    """Have a tensor hold what became of what it was sent as."""
    if sent.data_ptr() == tensor.data_ptr():
        return tensor
    return tensor.copy_(sent if sent.dtype == tensor.dtype else numbers_of(sent, tensor.dtype))


def broadcast(tensor: Tensor, axis: Axis, *, label: Label, source: int = 0) -> Pending[Tensor]:
    """Overwrite a tensor with that of rank `source` of the axis. Every rank of the axis must call it.

    Counted as if the source sent it to each of the others.
    """
    is_source = axis.rank == source
    others = axis.size - 1
    exchange = Exchange(
        "broadcast", axis, label, others * tensor.nbytes if is_source else 0, others if is_source else 0
    )
    if axis.size == 1:
        return done(exchange, tensor)
    sent = as_sent(tensor)
    with translated(exchange):
        work = dist.broadcast(as_bytes(sent), src=axis.ranks[source], group=axis.group, async_op=True)
    return Pending(exchange, [_some(work)], lambda: _take(tensor, sent))


def all_gather(tensor: Tensor, axis: Axis, *, label: Label) -> Deferred[Tensor]:
    """Gather tensors of one shape from all ranks: `[size, *tensor.shape]`. Every rank of the axis must call it.

    gloo passes parts on from rank to rank, `size - 1` latencies one after the other: small ones go straight to all.
    """
    is_small = tensor.nbytes * axis.size <= AT_ONCE_BYTES and axis.size > 1 and axis.device.type == "cpu"
    if is_small or shared(axis) is not None or levels(axis) is not None:
        part = as_sent(tensor).view(1, tensor.numel())
        gathered = all_gather_parts(part, [1] * axis.size, axis, label=label)
        return Deferred(lambda: gathered.wait().view(axis.size, *tensor.shape))
    exchange = Exchange("all-gather", axis, label, (axis.size - 1) * tensor.nbytes, axis.size - 1)
    if axis.size == 1:
        return done(exchange, tensor.unsqueeze(0))
    gathered = tensor.new_empty(axis.size * tensor.numel())
    with translated(exchange):
        work = _all_gather_flat(as_bytes(gathered), as_bytes(as_sent(tensor)), axis.group)
    return Pending(exchange, [work], lambda: gathered.view(axis.size, *tensor.shape))


def barrier(axis: Axis) -> None:
    """Return when every rank of the axis has come here."""
    all_reduce(torch.zeros(1, device=axis.device), axis, label="barrier").wait()


def _all_gather_flat(output: Tensor, part: Tensor, group: dist.ProcessGroup) -> dist.Work:
    # torch 2.13 renamed all_gather_into_tensor and warns about the old name.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return _some(gather(output, part, group=group, async_op=True))


def _some(work: dist.Work | None) -> dist.Work:
    assert work is not None, "an asynchronous collective returns its work on every rank of its group"
    return work
