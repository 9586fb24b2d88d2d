"""`Channel`: how letters travel between two ranks: over gloo, from the second step on as one message each.

A receiver has room ready for as much as ever came at once from that rank, so that a letter that fits is one message,
which gloo writes where it belongs without asking first; what does not fit comes as two, head and body. The sizes of the
letters so far settle how large the room is, so both sides know it without telling each other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from tulle.comm import traffic
from tulle.comm.pending import Exchange, translated
from tulle.errors import CommunicationError
from tulle.mesh import Axis
from tulle.pipeline.letters import HEAD_BYTES, Key, head_of, opened

_MOST_ROOM_BYTES = 16 * 2**20
"""Larger letters always come as two messages, as there is no use in keeping such room."""
_LABEL = "pipeline"
_PATIENT = timedelta(days=7)
"""gloo's own time-out: a rank from which nothing comes for long is not late until a program waits for it."""


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
        self._under_way: deque[tuple[dist.Work, Tensor]] = deque()
        """Messages that were sent, the oldest first; their memory is kept until they have been read."""
        self._room_there, self._room_here = HEAD_BYTES, HEAD_BYTES
        """Bytes of a message that the other rank can take, and those that we can."""
        self._spare: Tensor | None = None
        """Room that the last letter left free."""

    def send(self, letter: Tensor) -> None:
        """Send a letter, as `written` made it, without waiting; its memory must stay as it is."""
        room = self._room_there
        self._room_there = _room_after(room, letter.numel())
        for part in (letter,) if letter.numel() <= room else (letter[:HEAD_BYTES], letter[HEAD_BYTES:]):
            self._under_way.append((self._work(dist.isend, part), part))
            traffic.sent(_LABEL, part.numel(), 1)

    def flush(self, *, but: int) -> None:
        """Wait until all that was sent has been read, but for so many of the latest messages."""
        while len(self._under_way) > but:
            work, part = self._under_way.popleft()
            self._wait(work, part, "send")

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
    return {rank: Channel(lane, rank) for rank in range(axis.size) if rank != axis.rank}
