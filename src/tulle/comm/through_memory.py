"""`shared`: exchanges of an axis whose ranks share a host's memory, which need no network."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tulle.comm.levels import levels
from tulle.comm.pending import Arrived, Exchange, Pending, hand_over
from tulle.comm.scratch import scratch
from tulle.mesh import Axis
from tulle.shared_memory import Works, all_to_all, flat_bytes, works_of

_LENT_BYTES = 256 * 1024
"""What is smaller is copied sooner than it is looked for."""


def shared(axis: Axis) -> Works | None:
    """What goes through the memory of an axis' ranks; None where exchanges go through the backend."""
    return works_of(axis.group, axis.ranks, axis.timeout_s) if axis.device.type == "cpu" and axis.size > 1 else None


def exchange_through(
    works: Works,
    exchange: Exchange,
    sends: Sequence[Tensor],
    lengths: Sequence[int],
    arrived: Arrived | None = None,
) -> Pending[Tensor]:
    """Send a part to each rank of an axis, and receive one of so many entries from each.

    Args:
        works: Of the axis.
        exchange: What it is for.
        sends: One part for each rank, contiguous; that of this rank is what it receives from itself.
        lengths: Of the parts that come.
        arrived: What to do with each part when all are there.
    """
    place, others = works.channel.place, works.channel.others
    own = sends[place]
    received = scratch((sum(lengths), *own.shape[1:]), own, exchange.axis)
    receives = received.split(list(lengths))
    receives[place].copy_(own)
    flat = {key: flat_bytes(part) for key, part in {id(part): part for part in sends}.items()}
    work = all_to_all(
        works,
        {other: flat[id(sends[other])] for other in others},
        {other: flat_bytes(receives[other]) for other in others},
    )

    def finish() -> Tensor:
        hand_over(arrived, (place, *others), lengths, receives)
        return received

    return Pending(exchange, [work], finish)


def zeros(numel: int, like: Tensor, axis: Axis) -> Tensor:
    """Flat zeros, of a tensor's dtype and device, which an all-reduce over an axis does not copy.

    Where the ranks of the axis, or those of each host, share memory, all of them can reach what is large there.
    """
    works = shared(axis) or _inside(axis) if like.device.type == "cpu" else None
    if works is None or numel * like.itemsize < _LENT_BYTES:
        return torch.zeros(numel, dtype=like.dtype, device=like.device)
    return works.channel.lend(numel * like.itemsize).view(like.dtype)


def _inside(axis: Axis) -> Works | None:
    both = levels(axis)
    return None if both is None else both.inside
