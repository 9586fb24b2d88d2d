"""Exchanges of parts of unequal lengths: all-gather, all-to-all, and messages from one rank to another.

What they give may be handed back (`tulle.comm.release`) once it was read, for the next one to receive into.
Lengths are known on every rank's CPU before (a fixed-size all-gather told them), so nothing here waits for a size.

Ranks that share a host's memory exchange through it (`tulle.comm.through_memory`). Of others, what all ranks know to be
small is left to the backend's own all-to-all, which takes half to two thirds of the time and of the processor's; a
gathered part goes into it once for each rank. Two ranks alone swap their parts by it, and copy none but what stays.
All else is made of sends and receives in rounds: in round k, rank r sends to r + k and receives from r - k. Started all
at once, large messages collide at the receivers and lose a seventh to a third of the link; with two rounds under way
they do not. Small ones go at once, because a round costs a latency (`docs/design/sparse-gradients.md`).

    ranks 4         round 1      round 2      round 3
    rank 0 sends    to 1         to 2         to 3
    rank 0 gets     from 3       from 2       from 1
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from tulle.comm.as_sent import as_sent
from tulle.comm.levels import Levels, levels
from tulle.comm.pending import Arrived, Exchange, Label, Pending, hand_over, trace, translated
from tulle.comm.scratch import scratch
from tulle.comm.through_memory import exchange_through, shared
from tulle.comm.traffic import now_s, traffic
from tulle.mesh import Axis
from tulle.process_groups import backend_of
from tulle.shared_memory import Task, flat_bytes

R = TypeVar("R", bound="_Round | _Swap")
AT_ONCE_BYTES = 512 * 1024
"""An exchange in which this rank sends at most this much is started in all rounds at once."""
ROUNDS_UNDER_WAY = 2
"""Rounds under way at a time in a larger one."""

BACKEND_BYTES = 1024 * 1024
"""An all-to-all in which ranks send no more is left to the backend: it takes as long as rounds, and less of a core."""
BACKEND_GATHER_BYTES = 256 * 1024
"""The same of an all-gather, whose part is copied for each rank."""
IN_LEVELS_BYTES = 64 * 1024
"""A larger all-gather goes to each other host once, where hosts have several ranks."""
BACKEND_S = 0.008
"""The same in seconds on the wire, where the network was measured: at 1 Gbit/s as many bytes, at 10 ten times more."""

_exchanges: WeakKeyDictionary[dist.ProcessGroup, Counter[int]] = WeakKeyDictionary()
"""Exchanges that this process has had with each peer, by group."""


def all_gather_parts(
    part: Tensor, lengths: Sequence[int], axis: Axis, *, label: Label, arrived: Arrived | None = None
) -> Pending[Tensor]:
    """Gather parts of unequal lengths along dimension 0. Every rank of the axis must call it.

    Args:
        part: `[lengths[axis.rank], ...]`; trailing dimensions and dtype are the same on all ranks.
        lengths: Length of each rank's part, the same list on all ranks.
        axis: Whose ranks take part.
        label: What it is for.
        arrived: What to do with each part as it comes, in any order; this rank's own is the first.

    Returns:
        All parts end to end, in the order of ranks: `[sum(lengths), ...]`.
    """
    part = as_sent(part)
    if (works := shared(axis)) is not None:
        return exchange_through(
            works, _counted("all-gather", [part] * axis.size, axis, label), [part] * axis.size, lengths, arrived
        )
    most_bytes = (axis.size - 1) * max(lengths) * math.prod(part.shape[1:]) * part.element_size()
    if most_bytes > IN_LEVELS_BYTES and (both := levels(axis)) is not None:
        return _gather_in_levels(part, lengths, axis, both, label, arrived)
    is_small = is_for_backend(most_bytes, axis)
    is_swap = is_small and axis.size == 2
    if arrived is None and is_small and not is_swap and most_bytes <= BACKEND_GATHER_BYTES:
        return exchange_by_backend("all-gather", [part] * axis.size, lengths, axis, label)
    return _exchange("all-gather", [part] * axis.size, lengths, axis, label, arrived, is_swap=is_swap)


def all_to_all_parts(
    parts: Sequence[Tensor], lengths: Sequence[int], axis: Axis, *, label: Label, most_bytes: int | None = None
) -> Pending[Tensor]:
    """Send `parts[r]` to rank r and receive `lengths[r]` entries from it. Every rank of the axis must call it.

    Args:
        parts: One `[n, ...]` tensor for each rank; trailing dimensions and dtype agree everywhere.
        lengths: Length of the part that comes from each rank.
        axis: Whose ranks take part.
        label: What it is for.
        most_bytes: About what the fullest rank sends, the same number on all ranks; None if they do not know.

    Returns:
        What came from each rank and this rank's own part, end to end in the order of ranks: `[sum(lengths), ...]`.
    """
    parts = [as_sent(part) for part in parts]
    if (works := shared(axis)) is not None:
        return exchange_through(works, _counted("all-to-all", parts, axis, label), parts, lengths)
    is_small = most_bytes is not None and is_for_backend(most_bytes, axis)
    is_swap = is_small and axis.size == 2
    if is_small and not is_swap:
        return exchange_by_backend("all-to-all", parts, lengths, axis, label)
    return _exchange("all-to-all", parts, lengths, axis, label, is_swap=is_swap)


def is_for_backend(most_bytes: int, axis: Axis) -> bool:
    """Whether an exchange in which the fullest rank sends so much is left to the backend's own all-to-all."""
    limit = BACKEND_S * axis.measured[0].bandwidth_bytes_per_s if axis.measured else BACKEND_BYTES
    if most_bytes > limit or axis.size == 1 or axis.device.type != "cpu":
        return False
    # Two partners of a larger axis share its group: others of it do not call.
    return backend_of(axis.group, "cpu") == "gloo" and dist.get_world_size(axis.group) == axis.size


def exchange_by_backend(
    operation: str, parts: Sequence[Tensor], lengths: Sequence[int], axis: Axis, label: Label
) -> Pending[Tensor]:
    """As `all_to_all_parts`, by the backend's own; all ranks must have decided alike."""
    own = parts[axis.rank]
    exchange = _counted(operation, parts, axis, label)
    received = scratch((sum(lengths), *own.shape[1:]), own, axis)
    row_bytes = math.prod(own.shape[1:]) * own.element_size()
    flat = [flat_bytes(part) for part in parts]
    sizes = [length * row_bytes for length in lengths], [len(part) for part in flat]
    with translated(exchange):
        work = dist.all_to_all_single(flat_bytes(received), _end_to_end(flat), *sizes, group=axis.group, async_op=True)
    assert work is not None, "an asynchronous collective returns its work on every rank of its group"
    return Pending(exchange, [work], lambda: received)


# Not in a batch: the first of a process group connects, by nccl, all its ranks, of which two alone come here.
def send(tensor: Tensor, axis: Axis, *, to: int, label: Label) -> Pending[Tensor]:
    """Send a tensor to rank `to` of the axis, which must call `receive`."""
    exchange = Exchange("send", axis, label, tensor.nbytes, 1)
    with translated(exchange):
        work = dist.isend(as_sent(tensor), axis.ranks[to], axis.group)
    assert work is not None, "this rank is one of the group's"
    return Pending(exchange, [work], lambda: tensor)


def receive(tensor: Tensor, axis: Axis, *, source: int, label: Label) -> Pending[Tensor]:
    """Fill a contiguous tensor with what rank `source` of the axis sends."""
    exchange = Exchange("receive", axis, label, 0, 0)
    with translated(exchange):
        work = dist.irecv(tensor, axis.ranks[source], axis.group)
    assert work is not None, "this rank is one of the group's"
    return Pending(exchange, [work], lambda: tensor)


def _exchange(
    operation: str,
    sends: Sequence[Tensor],
    lengths: Sequence[int],
    axis: Axis,
    label: Label,
    arrived: Arrived | None = None,
    *,
    is_swap: bool = False,
) -> Pending[Tensor]:
    """Exchange by sends and receives in rounds; the first are posted now, the others as those before them end.

    Of two ranks the backend's all-to-all is the only one, if `is_swap`.
    """
    own = sends[axis.rank]
    exchange = _counted(operation, sends, axis, label)
    received = scratch((sum(lengths), *own.shape[1:]), own, axis) if axis.size > 1 else own
    receives = received.split(list(lengths))
    with translated(exchange):
        if is_swap:
            rounds = [_Swap(sends, receives, axis)]
        else:
            rounds = [one for one in _rounds(sends, receives, axis) if one.messages]
        ahead = len(rounds) if exchange.bytes_sent <= AT_ONCE_BYTES else ROUNDS_UNDER_WAY
        under_way = [one.post() for one in rounds[:ahead]]
    if is_swap and traffic.is_tracing:
        trace(under_way[0], exchange, now_s())

    def finish() -> Tensor:
        if received is not own:
            receives[axis.rank].copy_(own)
        hand_over(arrived, [axis.rank], lengths, receives)
        for one in _ended(rounds, under_way):
            hand_over(arrived, one.sources, lengths, receives)
        return received

    return Pending(exchange, (), finish)


def _gather_in_levels(
    part: Tensor, lengths: Sequence[int], axis: Axis, both: Levels, label: Label, arrived: Arrived | None
) -> Pending[Tensor]:
    """Gather from the ranks of this one's place on other hosts, and hand round on this host what comes.

    The bytes that a rank sends are those of a gather from all, but only one of the ranks of a host receives a part from
    another host, and sends it on.
    """
    received = scratch((sum(lengths), *part.shape[1:]), part, axis)
    receives = received.split(list(lengths))
    receives[axis.rank].copy_(part)
    flat = [flat_bytes(one) for one in receives]
    channel, own = both.inside.channel, both.across.rank
    rounds = _rounds([part] * both.across.size, [receives[ranks[channel.place]] for ranks in both.hosts], both.across)

    def hand_round(host: int) -> None:
        ranks = both.hosts[host]
        number = channel.tell(dict.fromkeys(channel.others, flat[ranks[channel.place]]))
        for place in channel.others:
            flat[ranks[place]].copy_(channel.hear(number, place, len(flat[ranks[place]])))

    def end(_: int) -> None:
        under_way = [one.post() for one in rounds[:ROUNDS_UNDER_WAY]]
        hand_round(own)
        for one in _ended(rounds, under_way):
            hand_round(one.sources[0])

    def finish() -> Tensor:
        hand_over(arrived, [axis.rank, *(rank for rank in range(axis.size) if rank != axis.rank)], lengths, receives)
        return received

    work = both.inside.submit(Task(end))
    return Pending(_counted("all-gather", [part] * axis.size, axis, label), [work], finish)


def _counted(operation: str, sends: Sequence[Tensor], axis: Axis, label: Label) -> Exchange:
    """An exchange of parts, with what this rank sends in it."""
    leaving = [part for r, part in enumerate(sends) if r != axis.rank and part.numel()]
    return Exchange(operation, axis, label, sum(part.nbytes for part in leaving), len(leaving))


def _end_to_end(parts: Sequence[Tensor]) -> Tensor:
    """Flat parts as one tensor: where they lie in memory if that is one after the other, as splits do, else copied."""
    full = [part for part in parts if len(part)]
    starts = [part.data_ptr() for part in full]
    ends = [start + part.nbytes for start, part in zip(starts, full, strict=True)]
    if not full or starts[1:] != ends[:-1] or len({part.untyped_storage().data_ptr() for part in full}) > 1:
        return torch.cat(list(parts))
    return full[0].as_strided((sum(map(len, full)),), (1,))


def _tags(axis: Axis) -> dict[int, int]:
    """A number for each peer's messages of this exchange.

    Of two exchanges under way a small one posts all its rounds at once while a peer may hold some of the first back:
    messages must find their own exchange. Both ends count the exchanges that they have had with each other, so ranks
    must begin those of one group in one order.
    """
    counts = _exchanges.setdefault(axis.group, Counter())
    counts.update(axis.ranks)
    return {peer: counts[peer] % 2**30 for peer in axis.ranks}


@dataclass(frozen=True, slots=True)
class _Round:
    """Messages that are posted together, and the ranks whose parts have come when they are done."""

    messages: list[dist.P2POp]
    sources: list[int]

    def post(self) -> list[dist.Work]:
        """Begin them."""
        return _post(self.messages)


@dataclass(frozen=True, slots=True)
class _Swap:
    """The only round of two ranks, by the backend's all-to-all, to which neither gives what it keeps."""

    sends: Sequence[Tensor]
    receives: Sequence[Tensor]
    axis: Axis

    @property
    def sources(self) -> list[int]:
        """The other rank."""
        return [1 - self.axis.rank]

    def post(self) -> list[dist.Work]:
        """Begin it, if either has something for the other."""
        [other] = self.sources
        leaving, coming = flat_bytes(self.sends[other]), flat_bytes(self.receives[other])
        if not len(leaving) and not len(coming):
            return []
        sizes = [[len(flat) * (rank == other) for rank in range(2)] for flat in (coming, leaving)]
        work = dist.all_to_all_single(coming, leaving, *sizes, group=self.axis.group, async_op=True)
        assert work is not None, "an asynchronous collective returns its work on every rank of its group"
        return [work]


def _rounds(sends: Sequence[Tensor], receives: Sequence[Tensor], axis: Axis) -> list[_Round]:
    """The messages of an exchange: in round k each rank sends to that k after it, and receives from that k before.

    So in a round a rank receives from one other only. What is empty is not sent.
    """
    tags = _tags(axis)
    rounds: list[_Round] = []
    for k in range(1, axis.size):
        to, source = (axis.rank + k) % axis.size, (axis.rank - k) % axis.size
        pair = [(dist.irecv, receives[source], source), (dist.isend, sends[to], to)]
        messages = [
            dist.P2POp(call, tensor, axis.ranks[peer], axis.group, tags[axis.ranks[peer]])
            for call, tensor, peer in pair
            if tensor.numel()
        ]
        rounds.append(_Round(messages, [source]))
    if axis.device.type == "cuda":  # nccl wants them as one group, and paces them itself
        others = [rank for rank in range(axis.size) if rank != axis.rank]
        rounds = [_Round([message for one in rounds for message in one.messages], others)]
    return rounds


def _post(messages: list[dist.P2POp]) -> list[dist.Work]:
    return dist.batch_isend_irecv(messages) if messages else []


def _ended(rounds: Sequence[R], under_way: list[list[dist.Work]]) -> Iterator[R]:
    """Wait for rounds one after the other, and begin others as those before them end.

    Args:
        rounds: All of them.
        under_way: The messages of the first, which have begun: so many stay under way.

    Returns:
        Each round that has ended.
    """
    ahead = len(under_way)
    for k, one in enumerate(rounds):
        for work in under_way.pop(0):
            work.wait()
        if k + ahead < len(rounds):
            under_way.append(rounds[k + ahead].post())
        yield one
