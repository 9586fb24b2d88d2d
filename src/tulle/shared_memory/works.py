"""`Works`: exchanges of a channel, one after the other, by whoever waits for one, or by a thread.

What an exchange sends goes out as it is submitted, if no other is under way: the other ranks then do not depend on when
this one waits for it. Else, and where ranks work on what they sent, a thread does it beside what others compute.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TypeVar

from torch.futures import Future

from tulle.shared_memory.channel import Channel
from tulle.shared_memory.region import unseen

T = TypeVar("T")
_LEAVING_S = 1.0
_AHEAD = 8
"""So many exchanges may have been sent and not yet ended: their messages have room where nobody takes them."""


@dataclass(frozen=True, slots=True)
class Task:
    """What is to be done.

    Args:
        end: Does the rest; given what `begin` gave.
        begin: Sends, and waits for nobody; None to do all at once, in a thread.
        is_carried: Whether all that is sent and received goes in messages.
    """

    end: Callable[[int], None]
    begin: Callable[[], int] | None = None
    is_carried: bool = False


class Works:
    """What is under way on a channel. All ranks must submit the same exchanges in the same order.

    Args:
        channel: Among them.
    """

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self._under_way: deque[Work] = deque()
        self._turn = threading.Lock()
        self._error: RuntimeError | None = None
        self._jobs: SimpleQueue[Work | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, task: Task) -> Work:
        """Have an exchange done after all that were submitted before; call it from one thread at a time."""
        work = Work(self, task)
        if task.begin is not None and self._turn.acquire(blocking=False):
            try:
                if self._can_begin(task):
                    work.begin()
            finally:
                self._under_way.append(work)
                self._turn.release()
        else:
            self._under_way.append(work)
        if not work.is_begun:
            self._do_beside(work)
        return work

    def do(self, work: Work) -> None:
        """Do all exchanges up to one that nobody has done yet."""
        with self._turn:
            while self._under_way and not work.is_done:
                self._under_way[0].end()
                self._under_way.popleft()

    def attempt(self, half: Callable[[], T]) -> T | RuntimeError:
        """Do a half of an exchange; once one has failed no other is done.

        Returns:
            What it gave, or what it, or one before it, failed of.
        """
        if self._error is not None:
            return self._error
        try:
            with unseen():
                if not self.channel.is_open:
                    self.channel.open()
                return half()
        except BaseException as error:
            self._error = error if isinstance(error, RuntimeError) else RuntimeError(f"{type(error).__name__}: {error}")
            self.channel.close()  # so that the others fail as well, and now
            if not isinstance(error, Exception):
                raise
            return self._error

    def close(self) -> None:
        """Fail what is under way, here and there, and wait a moment for the thread to end."""
        self._end()
        if self._thread is not None:
            self._thread.join(_LEAVING_S)

    def __del__(self) -> None:
        self._end()

    def _end(self) -> None:
        self.channel.close()
        self._jobs.put(None)

    def _can_begin(self, task: Task) -> bool:
        """Whether what is sent may go out now: everybody is there, and no slot is written that others still read."""
        if not self._under_way:
            return self.channel.is_open
        are_carried = task.is_carried and all(work.is_begun and work.is_carried for work in self._under_way)
        return are_carried and len(self._under_way) < _AHEAD

    def _do_beside(self, work: Work) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=_deliver, args=(self._jobs,), name="tulle-memory", daemon=True)
            self._thread.start()
        self._jobs.put(work)


class Work:
    """An exchange under way, as `torch.distributed.Work`. What it holds can go as soon as it has been sent, or read."""

    def __init__(self, works: Works, task: Task) -> None:
        self._works = works
        self._begin, self._end = task.begin, task.end
        self.is_carried = task.is_carried
        self.is_begun = self.is_done = False
        self._futures: list[Future[None]] = []
        self._given: int | RuntimeError = 0
        self._error: RuntimeError | None = None

    def begin(self) -> None:
        """Send, if that was not done before."""
        if self._begin is not None:
            self._given, self._begin = self._works.attempt(self._begin), None
            self.is_begun = True

    def end(self) -> None:
        """Do it whole."""
        self.begin()
        given, end = self._given, self._end
        found = given if isinstance(given, RuntimeError) else self._works.attempt(lambda: end(given))
        self._error = found if isinstance(found, RuntimeError) else None
        self._end = end = _nothing
        self.is_done = True
        for future in self._futures:
            future.set_result(None)

    def do(self) -> None:
        """Do it, and all before it, unless that was done."""
        if not self.is_done:
            self._works.do(self)

    def get_future(self) -> Future[None]:
        """What is set when it is done."""
        future = Future[None]()
        self._futures.append(future)
        return future

    def wait(self) -> None:
        """Wait until it is done.

        Raises:
            RuntimeError: If another rank has gone, or did not come in time.
        """
        self.do()
        if self._error is not None:
            raise RuntimeError(str(self._error)) from self._error


def _nothing(_: int) -> None:
    """What is left to do when all is done."""


def _deliver(jobs: SimpleQueue[Work | None]) -> None:
    while (work := jobs.get()) is not None:
        work.do()
        del work  # with its channel, which may go
