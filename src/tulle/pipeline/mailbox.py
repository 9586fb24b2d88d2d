"""`Mailbox`: messages between the ranks of the axis `pipe`, read as they come and kept until somebody asks for them.

    rank 0                              rank 1
    send(value, to=1) ── `Channel` ───▶ listener of rank 0 ──▶ mailbox ──▶ the program that waits for this key

A message is a header of fixed size, which says what comes, and a body. Messages from one rank to another keep their
order; a receiver needs no knowledge of it, because each has a key. During a step a listener for each rank reads all
that comes, so that values travel while this rank computes; outside of steps one listens only to ranks that somebody
waits for, so that nothing is under way when training pauses. What a rank of this host sends is there at once: whoever
looks for a message, or waits for one, reads it, and needs no listener.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import Any

from tulle.board import departed, first_failure
from tulle.comm import now_s, traffic
from tulle.errors import CommunicationError
from tulle.mesh import Axis, will_wait
from tulle.pipeline.bell import Bell
from tulle.pipeline.channels import channels_of
from tulle.pipeline.messages import Key, Kind, Message, OnHost
from tulle.pipeline.through_nccl import Arriving

_SENDS_KEPT = 2
"""Sends to one rank that may be under way within a step; the memory of older ones is waited for, and given back."""
_GRACE_S = 5.0
"""How long a rank whose step failed waits for the others to end theirs."""
_FOR_EVER = sys.maxsize
"""Stands for a run later than all: what failed in it concerns every run."""


class Mailbox:
    """The messages of one process.

    Args:
        axis: Whose ranks write to each other. Every rank of it must make one.
    """

    asks_peers = False
    """Whether a look at what has come is an exchange with other ranks."""

    def __init__(self, axis: Axis) -> None:
        self.axis = axis
        self.failure: str | None = None
        self._channels = channels_of(axis)
        self._readable = {
            channel.descriptor: rank for rank, channel in self._channels.items() if channel.descriptor is not None
        }
        """Ranks that need no listener, by where one sees that they have sent something."""
        self._listened = {rank: one for rank, one in self._channels.items() if one.descriptor is None}
        self._messages: dict[Key, Any] = {}
        self._lock = threading.Lock()
        """Held to change what listeners and programs share."""
        self._bell = Bell()
        """Rung by listeners when wanted messages come, or ranks end, and by who gives up."""
        self._wanted: Mapping[int, Collection[Key]] = {}
        self._listening: dict[int, threading.Thread] = {}
        self._run = 0
        """Number of the step, or of the program outside of steps, that this rank is at; the same on all ranks."""
        self._ended: dict[int, int] = {}
        """By rank the last run that is over there, and of those that failed why."""
        self._failed: dict[int, tuple[int, str]] = {}
        self._words: dict[int, dict[int, Any]] = {}
        """By run what ranks said last, by rank, in those that are over there."""
        self._is_open = False
        """Whether a step runs, in which all ranks are listened to."""

    def send(self, key: Key, content: object, *, to: Collection[int]) -> None:
        """Send a copy of a tensor, or something that pickles, to some ranks of the axis."""
        message = Message(key, content)
        for rank in to:
            self._channels[rank].send(message, is_expected=key[0] != Kind.ERROR)
            if self._is_open and rank in self._listened:  # elsewhere nobody might be listening
                self._channels[rank].flush(but=_SENDS_KEPT)

    def has(self, key: Key) -> bool:
        """Whether the message is there."""
        if self._readable and key not in self._messages:
            with self._lock:
                while key not in self._messages and self._await(0.0):
                    pass
        return key in self._messages

    def receive(self, key: Key, source: int, what: Callable[[], str]) -> Any:
        """The content of a message, as soon as it is there; raises as `await_any`.

        Args:
            key: Of it.
            source: The rank that sends it.
            what: Says what it is for, for the error.
        """
        if not self.has(key):
            self.await_any({source: [key]}, what)
        return self.take(key)

    def take(self, key: Key) -> Any:
        """The content of a message that is there."""
        with self._lock:
            content = self._messages.pop(key)
        return _taken(content)

    def look(self, key: Key) -> Any:
        """The content of a message that is there, and stays for others to read."""
        with self._lock:
            content = self._messages[key] = _taken(self._messages[key])
        return content

    def await_any(self, wanted: Mapping[int, Collection[Key]], what: Callable[[], str]) -> None:
        """Wait until one of the messages is there.

        Args:
            wanted: Keys by the rank that sends them.
            what: Says what the messages are for, for the error.

        Raises:
            CommunicationError: If none is there, and a rank failed or none came within the axis' time-out.
        """
        begin_s = now_s()
        deadline_s = begin_s + self.axis.timeout_s
        with self._lock:
            self._wanted = wanted
            self._listen(wanted)
            while self.failure is None and not self._is_any_there():
                if not self._await(max(0.0, deadline_s - now_s())):
                    self.failure = f"nothing came within {self.axis.timeout_s:g} s. {self._first_word()}"
            # What came before the word of a failure still counts: a program that every rank runs fails on all alike.
            is_there, self._wanted = self._is_any_there(), {}
        traffic.waited(now_s() - begin_s)
        traffic.span("waiting", f"wait: {what()}", begin_s, now_s())
        if self.failure is not None and not is_there:
            raise CommunicationError(
                f"rank {self.axis.rank} of axis {self.axis.name!r} waits for {what()} from rank "
                f"{', '.join(map(str, wanted))}: {self.failure}"
            )

    def give_up(self, why: str) -> None:
        """Have whoever waits fail; called by another thread."""
        with self._lock:
            self.failure = self.failure or f"the step was given up: {why}"
            self._bell.ring()

    def begin(self, run: int) -> None:
        """A step, or a program outside of steps, begins: what failed in an earlier one does not concern it.

        Args:
            run: Its number, the same on all ranks, larger than any before.
        """
        with self._lock:
            self._run = run
            self.failure = next((why for at, why in self._failed.values() if at >= run), None)

    def open(self, run: int) -> None:
        """A step begins: listen to all."""
        self.begin(run)
        with self._lock:
            self._is_open = True
            self._listen(self._others())

    def close(self, error: BaseException | None = None, *, word: object = None) -> dict[int, Any]:
        """A step ends, here with an error or not: tell the others, and wait until they have come here too.

        Args:
            error: What ended it here, if it did not end well.
            word: To the others.

        Returns:
            Theirs, by rank.

        Raises:
            CommunicationError: If another rank failed.
        """
        self.tell(error, word=word)
        deadline_s = now_s() + (self.axis.timeout_s if error is None else _GRACE_S)
        with self._lock:
            while not all(map(self._has_ended, self._others())) and (self.failure is None or error is not None):
                if not self._await(max(0.0, deadline_s - now_s())):
                    self.failure = self.failure or (
                        f"not all ranks came to the end of the step within {self.axis.timeout_s:g} s. "
                        f"{self._first_word()}"
                    )
                    break
            self._is_open = False
            self._ended = {rank: run for rank, run in self._ended.items() if run > self._run}
            words = self._words.get(self._run, {})
            self._words = {run: told for run, told in self._words.items() if run > self._run}
            # Outcomes are told once: after a step that failed, some have not been looked at.
            self._messages = {key: content for key, content in self._messages.items() if key[:2] == (Kind.OUTCOME, 0)}
        if error is None and self.failure is not None:
            raise CommunicationError(f"rank {self.axis.rank} of axis {self.axis.name!r} ends its step: {self.failure}")
        for channel in self._listened.values() if self.failure is None else ():
            channel.flush(but=0)
        return words

    def forget_outcomes(self) -> None:
        """Throw away what was told once, of calls that all ranks forget."""
        with self._lock:
            self._messages = {key: content for key, content in self._messages.items() if key[:2] != (Kind.OUTCOME, 0)}

    def tell(self, error: BaseException | None, *, word: object = None) -> None:
        """Tell all ranks that this one is done with the step, or that what runs now, in a step or not, failed."""
        if error is None:
            self.send((Kind.END, self._run, 0), word, to=self._others())
            return
        notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
        for rank in self._others():
            with suppress(CommunicationError):  # one that is gone keeps nobody else from hearing of it
                self.send((Kind.ERROR, self._run, 0), f"{type(error).__name__}: {error}{notes}", to=[rank])

    def flush(self, *, but: int) -> None:
        """Wait until all but the latest `but` sends to each rank have been read.

        All ranks must come to where they read it.
        """
        for channel in self._channels.values():
            channel.flush(but=but)

    def _others(self) -> list[int]:
        return list(self._channels)

    def _is_any_there(self) -> bool:
        return any(key in self._messages for keys in self._wanted.values() for key in keys)

    def _first_word(self) -> str:
        silence = "No rank has said why: see the log of each; all ranks must run the same program"
        return first_failure() or departed(self.axis.ranks) or silence

    def _listen(self, sources: Collection[int]) -> None:
        """Have a thread for each of these ranks that needs one; the lock is held."""
        for source in sources:
            if source in self._listened and source not in self._listening and not self._has_ended(source):
                thread = threading.Thread(
                    target=self._read, args=(source,), daemon=True, name=f"messages from {source}"
                )
                self._listening[source] = will_wait(thread)
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
            with self._lock:
                if not self._goes_on(source):
                    del self._listening[source]
                    return
            key, content = self._receive(source)
            with self._lock:
                self._note(source, key, content)
                if key[0] in (Kind.END, Kind.ERROR) or key in self._wanted.get(source, ()):
                    self._bell.ring()

    def _await(self, timeout_s: float) -> bool:
        """Wait until something comes, or the bell rings; the lock is held, and let go of meanwhile.

        Returns:
            Whether that was so before the time was over.
        """
        listened = [descriptor for descriptor, rank in self._readable.items() if self._goes_on(rank)]
        self._lock.release()
        try:
            ready = self._bell.wait(listened, timeout_s)
            messages = [(self._readable[one], self._receive(self._readable[one])) for one in ready or ()]
        finally:
            self._lock.acquire()
        for source, message in messages:
            self._note(source, *message)
        return ready is not None

    def _receive(self, source: int) -> tuple[Key, object]:
        try:
            return self._channels[source].receive()
        except Exception as error:  # whatever it is, the program must hear of it
            return (Kind.ERROR, _FOR_EVER, 0), f"{error}"

    def _note(self, source: int, key: Key, content: object) -> None:
        """A message came; the lock is held."""
        if key[0] in (Kind.END, Kind.ERROR):
            if key[0] == Kind.END:
                self._words.setdefault(key[1], {})[source] = content
            if key[1] == _FOR_EVER:
                self._ended.update(dict.fromkeys(self._others(), _FOR_EVER))
            self._note_end(source, key[1], content if key[0] == Kind.ERROR else None)
        else:
            self._messages[key] = content

    def _note_end(self, source: int, run: int, error: object) -> None:
        """A rank is done with a run; the lock is held."""
        self._ended[source] = max(run, self._ended.get(source, -1))
        if error is not None:
            why = f"rank {source} failed with {error}"
            self._failed[source] = run, why
            if run >= self._run and self.failure is None:
                self.failure = why


def _taken(content: Any) -> Any:
    return content.taken() if isinstance(content, Arriving | OnHost) else content


def mailbox_of(axis: Axis) -> Mailbox:
    """The mailbox of an axis, made once. Every rank of the axis must call it."""
    if Mailbox not in axis.kept:
        axis.kept[Mailbox] = Mailbox(axis)
    return axis.kept[Mailbox]
