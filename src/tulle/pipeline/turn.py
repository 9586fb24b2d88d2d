"""`Turn`: where the program of one micro-batch has come to, and what it waits for or has put off."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from tulle.pipeline.messages import Key
from tulle.pipeline.program import Program
from tulle.pipeline.split_backward import Work


class Turn:
    """One micro-batch's program and where it has come to.

    Args:
        micro_batch: Its number.
    """

    def __init__(self, micro_batch: int) -> None:
        self.micro_batch = micro_batch
        self.give_way: Callable[[Turn], None] = _nothing
        self.draw: Callable[[Turn], None] = _nothing
        self.pass_backward: Callable[[Turn], None] = _nothing
        """Called when it goes on after a backward."""
        self.may_go_on: Callable[[Turn, Key], bool] = _never
        """Whether a message is there and lets it pass nobody."""
        self.owed = deque[tuple[Turn, Work]]()
        """What micro-batches of this step have put off, the oldest first: so it adds to gradients in their order."""
        self.result: Any = None
        self.key: Key | None = None
        self.source = 0
        self.purpose = ""
        """The message that it waits for, the rank that sends it, and what for; the key is None if it waits for none."""
        self.is_at_backward = False
        """Whether it waits for the schedule to have backward begin; then it is `in_backward`, until that is over."""
        self.in_backward = False
        self.direction = "forward"
        """What it does, for the timeline: forward, backward or weights."""
        self.backwards = 0
        """How many it has come to."""
        self.work: Work | None = None
        """What it was chosen to do of what it has put off; None if it is to go on."""
        self.put_off_count = 0
        self.stages_put_off = 0
        """How many works it has put off and not done, and of how many stages."""
        self.is_coarse = False
        """Whether what it puts off is done at a time, since looking for something better takes long."""
        self.holds_nothing = False
        """Whether only what was put off is left to do, or only the result to wait for."""
        self.may_go = threading.Lock()
        self.may_go.acquire()
        """Held while its thread sleeps: released by whoever chooses it."""

    def begin(self, program: Program, body: Callable[[], Any]) -> None:
        """Say what it runs, once."""
        self.program, self.body = program, body

    def end(self, give_way: Callable[[Turn], None], may_go_on: Callable[[Turn, Key], bool]) -> None:
        """Let go of all but the result: a value that was kept past the end of the step may still wait by it.

        Else the batch and what the program made would stay until Python looks for cycles, which is many steps later.
        """
        self.give_way, self.may_go_on = give_way, may_go_on
        self.draw = self.pass_backward = _nothing
        del self.program, self.body

    def wait(self, key: Key, source: int, purpose: str) -> None:
        """Give way until a message is there, and to those that it would pass; called by the program."""
        if self.may_go_on(self, key):
            return
        self.key, self.source, self.purpose = key, source, purpose
        self.give_way(self)
        while self.work is not None:
            self._do(self.work)
            self.give_way(self)
        self.key = None

    def put_off(self, works: Sequence[Work]) -> None:
        """Leave work for when this rank would have nothing to do; called by the program, in backward."""
        if not works:
            return
        together: Work = partial(_all, works)
        all_works = [*([together] if self.is_coarse else works), self._stage_is_done]
        self.put_off_count += len(all_works)
        self.stages_put_off += 1
        self.owed.extend((self, work) for work in all_works)

    def catch_up(self) -> None:
        """Give way until all that was put off is done; called by the program, in backward."""
        self.holds_nothing = True
        while self.put_off_count:
            self.give_way(self)
            assert self.work is not None, "chosen for nothing else"
            self._do(self.work)
        self.holds_nothing = False

    def _stage_is_done(self) -> None:
        self.stages_put_off -= 1

    def _do(self, work: Work) -> None:
        self.work, self.put_off_count = None, self.put_off_count - 1
        direction, self.direction = self.direction, "weights"
        work()
        self.draw(self)
        self.direction = direction

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Give way until the schedule has backward begin; entered by the program."""
        self.is_at_backward = True
        self.backwards += 1
        self.give_way(self)
        self.is_at_backward, self.in_backward = False, True
        self.direction = "backward"
        yield
        self.draw(self)
        self.in_backward = False
        self.direction = "forward"
        self.pass_backward(self)


def _all(works: Sequence[Work]) -> None:
    for work in works:
        work()


def _nothing(*_: object) -> None:
    pass


def _never(*_: object) -> bool:
    return False
