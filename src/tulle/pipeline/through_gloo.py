"""`ThroughGloo`: messages to a rank with which this one shares no memory.

A receiver keeps a buffer as large as the largest message that ever came from that rank (up to 16 MiB). A message that
fits, as all do from the second step on, is one send, which gloo writes where it belongs without asking first; a larger
one is two, header and body. Both sides know the size of that buffer from the messages so far, without telling each
other.

gloo drops a send whose memory is freed before it was read. So what is under way is kept in an outbox, which outlives
the channel and its mesh; a process waits for its readers before it ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from tulle.board import is_failing
from tulle.comm import now_s, traffic
from tulle.mesh import Axis
from tulle.pipeline.channel import LABEL, Channel
from tulle.pipeline.messages import HEADER_BYTES, Key, Message, decode, decode_header

_MOST_ROOM_BYTES = 16 * 2**20
"""Larger messages always come as two sends, as there is no use in keeping such room."""


@dataclass(slots=True, eq=False)
class _Outbox:
    """The sends of one channel, the oldest first, until they are known to have been read."""

    lane: Axis
    """Whose process group must stay as long."""
    rank: int
    sends: deque[tuple[dist.Work, Tensor]] = field(default_factory=deque)
    is_expected: bool = True
    """Whether the other rank will read the last of them for sure: not so of an error."""


_unread = set[_Outbox]()
"""Those with sends in them, held by nobody else once their channels are gone."""


class ThroughGloo(Channel):
    """Messages to one other rank of an axis, and from it, through the network.

    Args:
        lane: The axis, on a process group of gloo's that nothing else uses.
        rank: The other one.
    """

    def __init__(self, lane: Axis, rank: int) -> None:
        super().__init__(lane)
        self._group = lane.group
        self._rank_in_group = dist.get_group_rank(lane.group, lane.ranks[rank])
        self._outbox = _Outbox(lane, rank)
        self._room_there, self._room_here = HEADER_BYTES, HEADER_BYTES
        """Bytes of a send that the other rank has a buffer for, and those that we have."""
        self._spare: Tensor | None = None
        """Room that the last message left free."""

    def send(self, message: Message, *, is_expected: bool = True) -> None:
        """Send a message without waiting."""
        raw, room = message.bytes(), self._room_there
        self._room_there = _room_after(room, raw.numel())
        for part in (raw,) if raw.numel() <= room else (raw[:HEADER_BYTES], raw[HEADER_BYTES:]):
            self._outbox.sends.append((self._start("send", part), part))
            traffic.sent(LABEL, part.numel(), 1)
        self._outbox.is_expected = is_expected
        _unread.add(self._outbox)

    def flush(self, *, but: int) -> None:
        """Wait until all but the latest `but` sends have been read."""
        while len(self._outbox.sends) > but:
            work, part = self._outbox.sends.popleft()
            self._wait(work, part, "send")
        if not self._outbox.sends:
            _unread.discard(self._outbox)

    def receive(self) -> tuple[Key, object]:
        """Wait for the next message; its key and its content, `OnHost` if it is for a GPU."""
        room, message = self._room_here, self._spare
        self._spare = None
        if message is None:
            message = torch.empty(room, dtype=torch.uint8)
        self._fill(message)
        header = decode_header(message)
        self._room_here = _room_after(room, header.message_bytes)
        if header.message_bytes > room:
            body = torch.empty(header.body_bytes, dtype=torch.uint8)
            self._fill(body)
        else:
            body = message[HEADER_BYTES : header.message_bytes]
            if header.message_bytes < room // 2:  # it would hold more memory than it needs
                body, self._spare = body.clone(), message
        return header.key, decode(header, body, self._lane.device)

    def _fill(self, buffer: Tensor) -> None:
        self._wait(self._start("recv", buffer), buffer, "recv")

    # Not by comm.send and comm.receive, which take 55 us where dist.isend takes 15, nor by that: it takes 10 us more.
    def _start(self, operation: str, buffer: Tensor) -> dist.Work:
        try:
            return getattr(self._group, operation)([buffer], self._rank_in_group, 0)
        except RuntimeError as error:
            raise self._told(error, operation, buffer.nbytes) from error

    def _wait(self, work: dist.Work, buffer: Tensor, operation: str) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            raise self._told(error, operation, buffer.nbytes) from error


def have_read(ranks: Collection[int]) -> None:
    """Some ranks, by their numbers among all, will not read any more of what was sent to them so far."""
    for outbox in [*_unread]:
        if outbox.lane.ranks[outbox.rank] in ranks:
            _unread.discard(outbox)


def await_readers() -> None:
    """Do not leave while other ranks may still want to read what this one has sent them."""
    begin_s = now_s()
    for outbox in [*_unread]:
        is_wanted = outbox.is_expected and not is_failing()  # else the others are failing too
        with suppress(RuntimeError):  # of a rank that is gone, or does not come
            while is_wanted and outbox.sends:
                left_s = outbox.lane.timeout_s - (now_s() - begin_s)
                outbox.sends.popleft()[0].wait(timedelta(seconds=max(left_s, 0.001)))


def _room_after(room: int, size: int) -> int:
    """What both sides take to be ready for the next message."""
    return max(room, size) if size <= _MOST_ROOM_BYTES else room
