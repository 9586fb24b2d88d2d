"""Exchanges of parts of unequal lengths: all-gather, all-to-all, and messages from one rank to another.

Lengths are known on every rank's CPU before (a fixed-size all-gather told them), so nothing here waits for a size.

All are made of sends and receives in rounds: in round k, rank r sends to r + k and receives from r - k. Started all at
once, large messages collide at the receivers and lose a seventh to a third of the link; with two rounds under way
they do not. Small ones go at once, because a round costs a latency (`docs/design.md`, 2026-11-21).

    ranks 4         round 1      round 2      round 3
    rank 0 sends    to 1         to 2         to 3
    rank 0 gets     from 3       from 2       from 1
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch.distributed as dist
from torch import Tensor

from tulle.comm.pending import Exchange, Label, Pending, done, translated
from tulle.mesh import Axis

AT_ONCE_BYTES = 512 * 1024
"""An exchange in which this rank sends at most this much is started in all rounds at once."""
ROUNDS_UNDER_WAY = 2
"""Rounds under way at a time in a larger one."""

Message = tuple[Callable[..., object], Tensor, int]
"""`dist.isend` or `dist.irecv`, what, and the peer's global rank."""


def all_gather_parts(part: Tensor, lengths: Sequence[int], axis: Axis, *, label: Label) -> Pending[Tensor]:
    """Gather parts of unequal lengths along dimension 0. Every rank of the axis must call it.

    Args:
        part: `[lengths[axis.rank], ...]`, contiguous; trailing dimensions and dtype are the same on all ranks.
        lengths: Length of each rank's part, the same list on all ranks.
        axis: Whose ranks take part.
        label: What it is for.

    Returns:
        All parts end to end, in the order of ranks: `[sum(lengths), ...]`.
    """
    return _exchange("all-gather", [part] * axis.size, lengths, axis, label)


def all_to_all_parts(parts: Sequence[Tensor], lengths: Sequence[int], axis: Axis, *, label: Label) -> Pending[Tensor]:
    """Send `parts[r]` to rank r and receive `lengths[r]` entries from it. Every rank of the axis must call it.

    Args:
        parts: One `[n, ...]` tensor for each rank, contiguous; trailing dimensions and dtype agree everywhere.
        lengths: Length of the part that comes from each rank.
        axis: Whose ranks take part.
        label: What it is for.

    Returns:
        What came from each rank and this rank's own part, end to end in the order of ranks: `[sum(lengths), ...]`.
    """
    return _exchange("all-to-all", parts, lengths, axis, label)


def send(tensor: Tensor, axis: Axis, *, to: int, label: Label) -> Pending[Tensor]:
    """Send a contiguous tensor to rank `to` of the axis, which must call `receive`."""
    exchange = Exchange("send", axis, label, tensor.nbytes, 1)
    with translated(exchange):
        works = _post([(dist.isend, tensor, axis.ranks[to])], axis)
    return Pending(exchange, works, lambda: tensor)


def receive(tensor: Tensor, axis: Axis, *, source: int, label: Label) -> Pending[Tensor]:
    """Fill a contiguous tensor with what rank `source` of the axis sends."""
    exchange = Exchange("receive", axis, label, 0, 0)
    with translated(exchange):
        works = _post([(dist.irecv, tensor, axis.ranks[source])], axis)
    return Pending(exchange, works, lambda: tensor)


def _exchange(
    operation: str, sends: Sequence[Tensor], lengths: Sequence[int], axis: Axis, label: Label
) -> Pending[Tensor]:
    own = sends[axis.rank]
    if axis.size == 1:
        return done(Exchange(operation, axis, label, 0, 0), own)
    received = own.new_empty((sum(lengths), *own.shape[1:]))
    receives = received.split(list(lengths))
    receives[axis.rank].copy_(own)
    leaving = [part for r, part in enumerate(sends) if r != axis.rank and part.numel()]
    exchange = Exchange(operation, axis, label, sum(part.nbytes for part in leaving), len(leaving))
    rounds = [_round(k, sends, receives, axis) for k in range(1, axis.size)]
    if dist.get_backend(axis.group) == "nccl":  # nccl wants them as one group, and paces them itself
        rounds = [[message for messages in rounds for message in messages]]
    is_small = exchange.bytes_sent <= AT_ONCE_BYTES
    ahead = len(rounds) if is_small else ROUNDS_UNDER_WAY
    with translated(exchange):
        under_way = [_post(messages, axis) for messages in rounds[:ahead]]

    def finish() -> Tensor:
        for messages in rounds[ahead:]:
            _wait(under_way.pop(0))
            under_way.append(_post(messages, axis))
        while under_way:
            _wait(under_way.pop(0))
        return received

    return Pending(exchange, (), finish)


def _round(k: int, sends: Sequence[Tensor], receives: Sequence[Tensor], axis: Axis) -> list[Message]:
    to, source = (axis.rank + k) % axis.size, (axis.rank - k) % axis.size
    messages: list[Message] = [
        (dist.irecv, receives[source], axis.ranks[source]),
        (dist.isend, sends[to], axis.ranks[to]),
    ]
    return [message for message in messages if message[1].numel()]


def _post(messages: Sequence[Message], axis: Axis) -> list[dist.Work]:
    if not messages:
        return []
    return dist.batch_isend_irecv([dist.P2POp(call, tensor, peer, axis.group) for call, tensor, peer in messages])


def _wait(works: Sequence[dist.Work]) -> None:
    for work in works:
        work.wait()
