"""`Post`: letters between the ranks of the axis `pipe`, read as they come and kept until somebody asks for them.

    rank 0                              rank 1
    send(value, to=1) ── head, body ──▶ listener of rank 0 ──▶ mailbox ──▶ the program that waits for this key

A letter is a head of fixed size, which says what comes, and a body. Letters from one rank to another keep their order;
a receiver needs no knowledge of it, because each has a key. During a step a listener for each rank reads all that
comes, so that values travel while this rank computes; outside of steps one listens only to ranks that somebody waits
for, so that nothing is under way when training pauses.

A receiver has room ready for as much as ever came at once from that rank, so that from the second step on a letter is
one message, which gloo writes where it belongs without asking first; what does not fit comes as two, head and body.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tulle.board import read as read_first_failure
from tulle.comm import now_s, traffic
from tulle.comm.pending import Exchange, translated
from tulle.errors import CommunicationError
from tulle.mesh import Axis
from tulle.pipeline.letters import HEAD_BYTES, Key, Kind, head_of, opened, written

MOST_ROOM_BYTES = 16 * 2**20
"""Larger letters always come as two messages, as there is no use in keeping such room."""
_SENDS_KEPT = 2
"""Letters to one rank that may be under way within a step; the memory of older ones is waited for, and given back."""
LABEL = "pipeline"
_PATIENT = timedelta(days=7)
"""gloo's own time-out: a rank from which nothing comes for long is not late until a program waits for it."""
_GRACE_S = 5.0
_FOR_EVER = sys.maxsize


class Post:
    """The letters of one process.

    Args:
        axis: Whose ranks write to each other. Every rank of it must make one.
    """

    def __init__(self, axis: Axis) -> None:
        self.axis = axis
        self.failure: str | None = None
        self._lane = _lane(axis)
        self._mailbox: dict[Key, Any] = {}
        self._arrival = threading.Condition()
        self._wanted: Mapping[int, Collection[Key]] = {}
        self._listening: dict[int, threading.Thread] = {}
        self._run = 0
        """Number of the step, or of the program outside of steps, that this rank is at; the same on all ranks."""
        self._ended: dict[int, int] = {}
        """By rank the last run that is over there, and of those that failed why."""
        self._failed: dict[int, tuple[int, str]] = {}
        self._is_open = False
        self._under_way: dict[int, deque[tuple[dist.Work, Tensor]]] = {rank: deque() for rank in range(axis.size)}
        self._room_at: dict[int, int] = {}
        """Bytes of a message that each rank can take, and those that we can from it."""
        self._room_for: dict[int, int] = {}
        self._spare: dict[int, Tensor] = {}

    def send(self, key: Key, content: object, *, to: Collection[int]) -> None:
        """Send a copy of a tensor, or something that pickles, to some ranks of the axis."""
        letter = written(key, content)
        for rank in to:
            room = self._room_at.get(rank, HEAD_BYTES)
            self._room_at[rank] = _room_after(room, letter.numel())
            under_way = self._under_way[rank]
            for part in (letter,) if letter.numel() <= room else (letter[:HEAD_BYTES], letter[HEAD_BYTES:]):
                under_way.append((self._work(dist.isend, part, rank), part))
                traffic.sent(LABEL, part.numel(), 1)
            if self._is_open:  # elsewhere nobody might be listening
                self._flush(rank, but=_SENDS_KEPT)

    def has(self, key: Key) -> bool:
        """Whether the letter is there."""
        return key in self._mailbox

    def take(self, key: Key) -> Any:
        """The content of a letter that is there."""
        with self._arrival:
            return self._mailbox.pop(key)

    def look(self, key: Key) -> Any:
        """The content of a letter that is there, and stays for others to read."""
        return self._mailbox[key]

    def await_any(self, wanted: Mapping[int, Collection[Key]], what: Callable[[], str]) -> None:
        """Wait until one of the letters is there.

        Args:
            wanted: Keys by the rank that sends them.
            what: Says what the letters are for, for the error.

        Raises:
            CommunicationError: If a rank failed, or none came within the axis' time-out.
        """
        begin_s = now_s()
        deadline_s = begin_s + self.axis.timeout_s
        with self._arrival:
            self._wanted = wanted
            self._listen(wanted)
            while self.failure is None and not self._is_any_there():
                if not self._arrival.wait(timeout=max(0.0, deadline_s - now_s())):
                    self.failure = f"nothing came within {self.axis.timeout_s:g} s. {self._first_word()}"
            self._wanted = {}
        traffic.waited(now_s() - begin_s)
        traffic.span("waiting", f"wait: {what()}", begin_s, now_s())
        if self.failure is not None:
            raise CommunicationError(
                f"rank {self.axis.rank} of axis {self.axis.name!r} waits for {what()} from rank "
                f"{', '.join(map(str, wanted))}: {self.failure}"
            )

    def give_up(self, why: str) -> None:
        """Have whoever waits fail; called by another thread."""
        with self._arrival:
            self.failure = self.failure or f"the step was given up: {why}"
            self._arrival.notify_all()

    def begin(self, run: int) -> None:
        """A step, or a program outside of steps, begins: what failed in an earlier one does not concern it.

        Args:
            run: Its number, the same on all ranks, larger than any before.
        """
        with self._arrival:
            self._run = run
            self.failure = next((why for at, why in self._failed.values() if at >= run), None)

    def open(self, run: int) -> None:
        """A step begins: listen to all."""
        self.begin(run)
        with self._arrival:
            self._is_open = True
            self._listen(self._others())

    def close(self, error: BaseException | None = None) -> None:
        """A step ends, here with an error or not: tell the others, and wait until they have come here too.

        Raises:
            CommunicationError: If another rank failed.
        """
        self.tell(error)
        deadline_s = now_s() + (self.axis.timeout_s if error is None else _GRACE_S)
        with self._arrival:
            while not all(map(self._has_ended, self._others())) and (self.failure is None or error is not None):
                if not self._arrival.wait(timeout=max(0.0, deadline_s - now_s())):
                    self.failure = self.failure or (
                        f"not all ranks came to the end of the step within {self.axis.timeout_s:g} s. "
                        f"{self._first_word()}"
                    )
                    break
            self._is_open = False
            self._ended = {rank: run for rank, run in self._ended.items() if run > self._run}
            # Outcomes are told once: after a step that failed, some have not been looked at.
            self._mailbox = {key: content for key, content in self._mailbox.items() if key[:2] == (Kind.OUTCOME, 0)}
        if error is None and self.failure is not None:
            raise CommunicationError(f"rank {self.axis.rank} of axis {self.axis.name!r} ends its step: {self.failure}")
        if self.failure is None:
            self.flush()

    def tell(self, error: BaseException | None) -> None:
        """Tell all ranks that this one is done with the step, or that what runs now, in a step or not, failed."""
        text = (
            ""
            if error is None
            else f"{type(error).__name__}: {error}" + "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
        )
        self.send((Kind.END if error is None else Kind.ERROR, self._run, 0), text, to=self._others())

    def flush(self, *, but: int = 0) -> None:
        """Wait until all that was sent has been read, but for so many of the latest letters to each rank.

        All ranks must come to where they read it.
        """
        for rank in self._under_way:
            self._flush(rank, but=but)

    def _flush(self, rank: int, *, but: int) -> None:
        under_way = self._under_way[rank]
        while len(under_way) > but:
            work, letter = under_way.popleft()
            self._wait(work, letter, "send")

    def _others(self) -> list[int]:
        return [rank for rank in range(self.axis.size) if rank != self.axis.rank]

    def _is_any_there(self) -> bool:
        return any(key in self._mailbox for keys in self._wanted.values() for key in keys)

    def _first_word(self) -> str:
        return read_first_failure() or "No rank has said why: see the log of each; all ranks must run the same program"

    def _listen(self, sources: Collection[int]) -> None:
        """Have a thread for each of these ranks; the lock is held."""
        for source in sources:
            if source not in self._listening and not self._has_ended(source):
                thread = threading.Thread(target=self._read, args=(source,), daemon=True, name=f"post from {source}")
                self._listening[source] = thread
                thread.start()

    def _has_ended(self, source: int) -> bool:
        return self._ended.get(source, -1) >= self._run

    def _goes_on(self, source: int) -> bool:
        if self._is_open:
            return not self._has_ended(source)
        return source in self._wanted and not self._is_any_there() and self.failure is None

    def _read(self, source: int) -> None:
        traffic.is_background.flag = True  # its waiting holds nobody up
        while True:
            with self._arrival:
                if not self._goes_on(source):
                    del self._listening[source]
                    return
            try:
                key, content = self._receive(source)
            except Exception as error:  # whatever it is, the program must hear of it
                key, content = (Kind.ERROR, _FOR_EVER, 0), f"{error}"
                with self._arrival:
                    self._ended.update(dict.fromkeys(self._others(), _FOR_EVER))
            with self._arrival:
                if key[0] in (Kind.END, Kind.ERROR):
                    self._note_end(source, key[1], content if key[0] == Kind.ERROR else None)
                    continue
                self._mailbox[key] = content
                if key in self._wanted.get(source, ()):
                    self._arrival.notify_all()

    def _note_end(self, source: int, run: int, error: object) -> None:
        """A rank is done with a run; the lock is held."""
        self._ended[source] = max(run, self._ended.get(source, -1))
        if error is not None:
            why = f"rank {source} failed with {error}"
            self._failed[source] = run, why
            if run >= self._run and self.failure is None:
                self.failure = why
        self._arrival.notify_all()

    def _receive(self, source: int) -> tuple[Key, object]:
        room = self._room_for.get(source, HEAD_BYTES)
        letter = self._spare.pop(source, None)
        if letter is None:
            letter = torch.empty(room, dtype=torch.uint8)
        self._fill(letter, source)
        head = head_of(letter)
        self._room_for[source] = _room_after(room, head.letter_bytes)
        if head.letter_bytes > room:
            body = torch.empty(head.body_bytes, dtype=torch.uint8)
            self._fill(body, source)
        else:
            body = letter[HEAD_BYTES : head.letter_bytes]
            if head.letter_bytes < room // 2:  # it would hold more memory than it needs
                body, self._spare[source] = body.clone(), letter
        return head.key, opened(head, body, self.axis.device)

    def _fill(self, buffer: Tensor, source: int) -> None:
        self._wait(self._work(dist.irecv, buffer, source), buffer, "receive")

    # Not by comm.send and comm.receive, which take 55 us where this takes 15.
    def _work(self, start: Callable[..., dist.Work | None], buffer: Tensor, rank: int) -> dist.Work:
        try:
            work = start(buffer, self._lane.ranks[rank], group=self._lane.group)
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
            with translated(Exchange(operation, self._lane, LABEL, buffer.nbytes, 1)):
                raise error
        except CommunicationError as told:
            return told


def _room_after(room: int, size: int) -> int:
    """What both sides take to be ready for the next letter."""
    return max(room, size) if size <= MOST_ROOM_BYTES else room


def post_of(axis: Axis) -> Post:
    """The post of an axis, made once. Every rank of the axis must call it."""
    if Post not in axis.kept:
        axis.kept[Post] = Post(axis)
    return axis.kept[Post]


def _lane(axis: Axis) -> Axis:
    if axis.size == 1:
        return axis
    # Always gloo: a receiver does not know what comes next, which nccl wants it to. Bodies go through the CPU.
    group = dist.new_group(list(axis.ranks), timeout=_PATIENT, backend="gloo", use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup), "this rank is one of the group's"
    return replace(axis, group=group, lanes={}, measured=[], kept={})
