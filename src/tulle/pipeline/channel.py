"""`Channel`: how letters travel between two ranks: over gloo, from the second step on as one message each.

A receiver has room ready for as much as ever came at once from that rank, so that a letter that fits is one message,
which gloo writes where it belongs without asking first; what does not fit comes as two, head and body. The sizes of the
letters so far settle how large the room is, so both sides know it without telling each other.

gloo drops a message whose memory goes before it is read. So what is under way is kept in an outbox, which outlives the
channel and its mesh; a process waits for its readers before it ends.
"""

from __future__ import annotations

import atexit
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from tulle.board import is_failing
from tulle.comm import now_s, traffic
from tulle.comm.pending import Exchange, translated
from tulle.errors import CommunicationError
from tulle.mesh import Axis
from tulle.pipeline.letters import HEAD_BYTES, Key, head_of, opened

_MOST_ROOM_BYTES = 16 * 2**20
"""Larger letters always come as two messages, as there is no use in keeping such room."""
_LABEL = "pipeline"
_PATIENT = timedelta(days=7)
"""gloo's own time-out: a rank from which nothing comes for long is not late until a program waits for it."""


@dataclass(slots=True, eq=False)
class _Outbox:
    """Messages that were sent over one channel, the oldest first, until they are known to have been read."""

    lane: Axis
    """Whose process group must stay as long."""
    rank: int
    messages: deque[tuple[dist.Work, Tensor]] = field(default_factory=deque)
    is_expected: bool = True
    """Whether the other rank will read the last of them for sure: not so of an error."""


_unread = set[_Outbox]()
"""Those with messages in them, held by nobody else once their channels are gone."""


class Channel:
    """Letters to one other rank of an axis, and from it.

    The two directions share nothing: while a thread sends, another may receive. Errors of gloo are raised as
    `CommunicationError`.

    Args:
        lane: The axis, on a process group that nothing else uses.
        rank: The other one.
    """

    def __init__(self, lane: Axis, rank: int) -> None:
        self._lane, self._rank = lane, rank
        self._outbox = _Outbox(lane, rank)
        self._room_there, self._room_here = HEAD_BYTES, HEAD_BYTES
        """Bytes of a message that the other rank can take, and those that we can."""
        self._spare: Tensor | None = None
        """Room that the last letter left free."""

    def send(self, letter: Tensor, *, is_expected: bool = True) -> None:
        """Send a letter, as `written` made it, without waiting; its memory must stay as it is.

        Args:
            letter: It.
            is_expected: Whether the other rank will read it for sure, so that this one must not end before.
        """
        room = self._room_there
        self._room_there = _room_after(room, letter.numel())
        for part in (letter,) if letter.numel() <= room else (letter[:HEAD_BYTES], letter[HEAD_BYTES:]):
            self._outbox.messages.append((self._work(dist.isend, part), part))
            traffic.sent(_LABEL, part.numel(), 1)
        self._outbox.is_expected = is_expected
        _unread.add(self._outbox)

    def flush(self, *, but: int) -> None:
        """Wait until all that was sent has been read, but for so many of the latest messages."""
        while len(self._outbox.messages) > but:
            work, part = self._outbox.messages.popleft()
            self._wait(work, part, "send")
        if not self._outbox.messages:
            _unread.discard(self._outbox)

    def receive(self) -> tuple[Key, object]:
        """Wait for the next letter; its key and its content, a tensor on the axis' device."""
        room, letter = self._room_here, self._spare
        self._spare = None
        if letter is None:
            letter = torch.empty(room, dtype=torch.uint8)
        self._fill(letter)
        head = head_of(letter)
        self._room_here = _room_after(room, head.letter_bytes)
        if head.letter_bytes > room:
            body = torch.empty(head.body_bytes, dtype=torch.uint8)
            self._fill(body)
        else:
            body = letter[HEAD_BYTES : head.letter_bytes]
            if head.letter_bytes < room // 2:  # it would hold more memory than it needs
                body, self._spare = body.clone(), letter
        return head.key, opened(head, body, self._lane.device)

    def _fill(self, buffer: Tensor) -> None:
        self._wait(self._work(dist.irecv, buffer), buffer, "receive")

    # Not by comm.send and comm.receive, which take 55 us where this takes 15.
    def _work(self, start: Callable[..., dist.Work | None], buffer: Tensor) -> dist.Work:
        try:
            work = start(buffer, self._lane.ranks[self._rank], group=self._lane.group)
        except RuntimeError as error:
            raise self._told(error, start.__name__, buffer) from error
        assert work is not None, "this rank is one of the group's"
        return work

    def _wait(self, work: dist.Work, buffer: Tensor, operation: str) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            raise self._told(error, operation, buffer) from error

    def _told(self, error: RuntimeError, operation: str, buffer: Tensor) -> Exception:
        try:
            with translated(Exchange(operation, self._lane, _LABEL, buffer.nbytes, 1)):
                raise error
        except CommunicationError as told:
            return told


def _room_after(room: int, size: int) -> int:
    """What both sides take to be ready for the next letter."""
    return max(room, size) if size <= _MOST_ROOM_BYTES else room


def channels_of(axis: Axis) -> dict[int, Channel]:
    """A channel to each other rank of an axis, by its rank, ascending. Every rank of the axis must call it."""
    if axis.size == 1:
        return {}
    # Always gloo: a receiver does not know what comes next, which nccl wants it to. Bodies go through the CPU.
    group = dist.new_group(list(axis.ranks), timeout=_PATIENT, backend="gloo", use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup), "this rank is one of the group's"
    lane = replace(axis, group=group, lanes={}, measured=[], kept={})
    for outbox in [*_unread]:  # these ranks have come to here, so they have read what they wanted of earlier meshes
        if outbox.lane.ranks[outbox.rank] in lane.ranks:
            _unread.discard(outbox)
    atexit.unregister(_await_readers)
    atexit.register(_await_readers)  # runs before what ends the process groups, which was registered earlier
    return {rank: Channel(lane, rank) for rank in range(axis.size) if rank != axis.rank}


def _await_readers() -> None:
    """Do not leave while other ranks may still want to read what this one has sent them."""
    begin_s = now_s()
    for outbox in [*_unread]:
        is_wanted = outbox.is_expected and not is_failing()  # else the others are failing too
        with suppress(RuntimeError):  # of a rank that is gone, or does not come
            while is_wanted and outbox.messages:
                left_s = outbox.lane.timeout_s - (now_s() - begin_s)
                outbox.messages.popleft()[0].wait(timedelta(seconds=max(left_s, 0.001)))
