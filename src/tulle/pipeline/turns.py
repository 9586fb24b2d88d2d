"""`Turns`: the programs of a step's micro-batches, one of which runs at a time; one that waits gives way to another.

Each program is the user's own function, so it needs a stack of its own: a thread. One runs, the others are parked:

    the step's thread                       thread of micro-batch 0            thread of micro-batch 1
    go ───────────────────────────────────▶ forward ... needs a value
    choose by the schedule ◀─ waits for it ─┘
    go ───────────────────────────────────────────────────────────────────────▶ forward ... ready for backward
    choose ◀──────────────────────────────────────────────────────────────────── waits for its turn
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack

from tulle.comm import now_s, traffic
from tulle.pipeline.post import Key, Post
from tulle.pipeline.program import Program
from tulle.pipeline.randomness import State, seed_all
from tulle.pipeline.schedule import Schedule, preference


class Abandoned(BaseException):
    """Unwinds a program whose step has failed elsewhere."""


class Turn:
    """One micro-batch's program and its thread.

    Args:
        micro_batch: Its number.
    """

    def __init__(self, micro_batch: int) -> None:
        self.micro_batch = micro_batch
        self.program: Program | None = None
        self.error: BaseException | None = None
        self.result: Any = None
        self.key: Key | None = None
        self.source = 0
        self.purpose = ""
        self.is_done = False
        self.is_at_backward = False
        self.in_backward = False
        self._state: State | None = None
        self._may_go, self._has_stopped = threading.Semaphore(0), threading.Semaphore(0)
        self._is_abandoned = False

    def begin(self, program: Program, body: Callable[[], Any]) -> None:
        """Make the thread, which waits for its first `go`."""
        self.program = program
        context, surroundings = contextvars.copy_context(), Surroundings()
        thread = threading.Thread(
            target=context.run,
            args=(self._run, body, surroundings),
            daemon=True,
            name=f"micro-batch {self.micro_batch}",
        )
        thread.start()

    def go(self) -> None:
        """Let it run until it waits or is done; called by the step's thread."""
        begin_s = now_s()
        direction = "backward" if self.in_backward or self.is_at_backward else "forward"
        self._may_go.release()
        self._has_stopped.acquire()
        traffic.span("stage", f"{direction} {self.micro_batch}", begin_s, now_s())

    def abandon(self) -> None:
        """End the thread."""
        if not self.is_done:
            self._is_abandoned = True
            self.go()

    def wait(self, key: Key, source: int, purpose: str) -> None:
        """Give way until a letter is there; called by the program."""
        self.key, self.source, self.purpose = key, source, purpose
        self._stop()
        self.key = None

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Give way until the schedule has backward begin; entered by the program."""
        self.is_at_backward = True
        self._stop()
        self.is_at_backward, self.in_backward = False, True
        yield
        self.in_backward = False

    def _run(self, body: Callable[[], Any], surroundings: Surroundings) -> None:
        self._may_go.acquire()
        try:
            if not self._is_abandoned and self.program is not None:
                seed_all(self.program.seed)
                with surroundings:
                    self.result = body()
        except BaseException as error:
            self.error = error
        self.is_done = True
        self._has_stopped.release()

    def _stop(self) -> None:
        self._state = State.now()
        self._has_stopped.release()
        self._may_go.acquire()
        if self._is_abandoned:
            raise Abandoned
        self._state.restore()


class Surroundings(ExitStack):
    """What torch keeps for each thread, as it is where this is made; entered in another thread it holds there too."""

    def __init__(self) -> None:
        super().__init__()
        self._grad = torch.is_grad_enabled()
        self._inference = torch.is_inference_mode_enabled()
        self._autocast = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")
        ]
        self._modes = _get_current_function_mode_stack()
        self._device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def __enter__(self) -> Surroundings:
        super().__enter__()
        if self._device is not None:
            torch.cuda.set_device(self._device)
        self.enter_context(torch.inference_mode(self._inference))
        self.enter_context(torch.set_grad_enabled(self._grad))
        for kind, is_enabled, dtype in self._autocast:
            if is_enabled:
                self.enter_context(torch.autocast(kind, dtype))
        for mode in self._modes:
            self.enter_context(mode)
        return self


def take_turns(
    turns: Sequence[Turn], begin: Callable[[Turn], None], post: Post, schedule: Schedule, held: int
) -> float:
    """Run all programs to their ends.

    Args:
        turns: In the order of micro-batches.
        begin: Makes a program's thread.
        post: Where letters arrive.
        schedule: Which of those that are ready comes next.
        held: How many may have begun and not ended.

    Returns:
        Seconds for which no program could run: the bubble, and what communication added to it.
    """
    waiting, begun, idle_s = list(turns), [], 0.0
    with _abandoned_on_error(begun):
        while waiting or begun:
            ready = [turn for turn in begun if _is_ready(turn, post, schedule, waiting, begun)]
            if waiting and len(begun) < held:
                ready.append(waiting[0])
            if not ready:
                begin_s = now_s()
                _await_letters(begun, post)
                idle_s += now_s() - begin_s
                continue
            best = min(ready, key=lambda turn: _preference(turn, schedule, post.axis.size))
            if waiting and best is waiting[0]:
                begun.append(waiting.pop(0))
                begin(best)
            best.go()
            if best.error is not None:
                raise best.error
            if best.is_done:
                begun.remove(best)
    return idle_s


def _is_ready(turn: Turn, post: Post, schedule: Schedule, waiting: Sequence[Turn], begun: Sequence[Turn]) -> bool:
    if turn.is_at_backward:
        are_all_forward_done = not waiting and all(other.is_at_backward or other.in_backward for other in begun)
        return schedule != "gpipe" or are_all_forward_done
    return turn.key is None or post.has(turn.key)


def _preference(turn: Turn, schedule: Schedule, ranks: int) -> tuple[int, ...]:
    in_backward = turn.in_backward or turn.is_at_backward
    return preference(
        schedule, turn.micro_batch, ranks, turn.program.stage if turn.program else 0, in_backward=in_backward
    )


def _await_letters(begun: Sequence[Turn], post: Post) -> None:
    wanted: dict[int, list[Key]] = {}
    for turn in begun:
        if turn.key is not None:
            wanted.setdefault(turn.source, []).append(turn.key)
    post.await_any(wanted, lambda: "; ".join(turn.purpose for turn in begun if turn.key is not None))


@contextmanager
def _abandoned_on_error(begun: Sequence[Turn]) -> Iterator[None]:
    try:
        yield
    except BaseException:
        for turn in begun:
            turn.abandon()
        raise
