"""`Turns`: the programs of a step's micro-batches, one of which runs at a time; one that waits gives way to another.

Each program is the user's own function, so it needs a stack of its own: a thread. Whoever stops looks by the schedule
who goes on, and wakes that one; often that is itself, which costs nothing:

    thread of micro-batch 0               thread of micro-batch 1               the step's thread
    forward ... needs a value                                                   sleeps until all are done
    chooses 1, wakes it ────────────────▶ forward ... ready for backward
    sleeps                                chooses itself: backward ...
    goes on ◀──────────────────────────── needs a gradient: chooses 0, wakes it
    is done: begins micro-batch 2 itself

Threads stay for later micro-batches and steps, so that there are as many as ever were needed at once, with warm memory.
"""

from __future__ import annotations

import contextvars
import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack

from tulle.comm import now_s, traffic
from tulle.kept_memory import keep_memory
from tulle.pipeline.mailbox import Mailbox
from tulle.pipeline.messages import Key
from tulle.pipeline.modes import Modes
from tulle.pipeline.randomness import State, seed_all
from tulle.pipeline.schedule import Schedule, held_at_once, in_idleness, kept_at_once, preference, stages_here
from tulle.pipeline.split_backward import Work
from tulle.pipeline.switches import Switches
from tulle.pipeline.turn import Turn
from tulle.pipeline.views import Views

_autograd: Any = vars(torch._C)["_autograd"]


class Abandoned(BaseException):
    """Unwinds a program whose step has failed elsewhere."""


class Turns:
    """The turns of one step.

    Args:
        turns: In the order of micro-batches, each with its program and its body.
        mailbox: Where messages arrive.
        schedule: Which of those that are ready comes next.
        stages: Of the whole pipeline.
        in_order: Whether each forward is to end, on this rank, before the next begins.
        modes: What programs set on modules for a while.
        views: What their forwards leave on modules.
    """

    def __init__(
        self,
        turns: Sequence[Turn],
        mailbox: Mailbox,
        schedule: Schedule,
        stages: int,
        *,
        in_order: bool = False,
        modes: Modes | None = None,
        views: Views | None = None,
    ) -> None:
        self._mailbox, (rank, ranks) = mailbox, (mailbox.axis.rank, mailbox.axis.size)
        self._schedule: Schedule = schedule
        self._in_order, self._modes, self._views = in_order, modes or Modes(_nothing), views or Views()
        self._switches = Switches()
        self._most_held = held_at_once(schedule, rank, ranks, stages, len(turns))
        self._most_kept = kept_at_once(schedule, rank, ranks, stages, len(turns))
        self._stages_here = stages_here(rank, ranks, stages)
        self._turns, self._to_begin, self._begun = turns, list(turns), list[Turn]()
        """Of all turns those whose programs have not begun, and those under way, in the order in which they began."""
        self._owed = deque[tuple[Turn, Work]]()
        self._starts = {turn: (contextvars.copy_context(), Surroundings()) for turn in turns}
        self._is_over = threading.Lock()
        self._error: BaseException | None = None
        self._idle_s, self._since_s = 0.0, now_s()
        for turn in turns:
            turn.give_way, turn.draw, turn.owed = self._give_way, self._draw, self._owed
            turn.may_go_on, turn.pass_backward = self._may_go_on, self._views.pass_backward
            turn.is_coarse = mailbox.asks_peers

    def run(self) -> float:
        """Run all programs to their ends.

        Returns:
            Seconds for which no program could run: the bubble, and what communication added to it.
        """
        state = State.now()
        self._is_over.acquire()
        _employ(self._work)
        try:
            self._is_over.acquire()
        except BaseException as error:  # an interrupt, which reaches this thread only: the others unwind now
            self._error = error
            self._mailbox.give_up(f"{type(error).__name__}")
            self._is_over.acquire()
        state.restore()
        self._modes.put_back()
        self._switches.put_back()
        for turn in self._turns:
            turn.end(self._await_alone, self._is_there)
        self._turns, self._to_begin, self._begun = (), [], []
        self._starts.clear()
        self._owed.clear()
        if self._error is not None:
            raise self._error
        return self._idle_s

    def _await_alone(self, turn: Turn) -> None:
        """What a value that was kept past the end of the step waits for."""
        if turn.key is not None:
            self._mailbox.await_any({turn.source: [turn.key]}, lambda: turn.purpose)

    def _is_there(self, turn: Turn, key: Key) -> bool:
        del turn
        return self._mailbox.has(key)

    def _may_go_on(self, turn: Turn, key: Key) -> bool:
        """Whether a message is there, and no earlier micro-batch waits on the same way, whose own may have come too.

        This one was chosen before; if it went on nevertheless, the order of sums would depend on time.
        """
        return self._mailbox.has(key) and not any(
            other.key is not None and other.micro_batch < turn.micro_batch and other.in_backward == turn.in_backward
            for other in self._begun
        )

    def _work(self, turn: Turn | None = None) -> threading.Lock:
        """Run one program after another to its end, until one that sleeps comes first; give what wakes who is next."""
        turn = turn or self._choose()
        while turn is not None and turn in self._starts:
            context, surroundings = self._starts.pop(turn)
            context.run(self._run, turn, surroundings)
            self._begun.remove(turn)
            self._draw(turn)
            turn = self._choose()
        return self._is_over if turn is None else turn.may_go

    def _run(self, turn: Turn, surroundings: Surroundings) -> None:
        seed_all(turn.program.seed)
        self._modes.put_back()
        self._switches.put_back()
        self._views.begin(turn)
        try:
            with surroundings:
                turn.result = turn.body()
            self._modes.end(turn.micro_batch)
            self._switches.end(turn.micro_batch)
            self._views.end(turn)
        except BaseException as error:
            self._error = self._error or error

    def _give_way(self, turn: Turn) -> None:
        self._draw(turn)
        self._views.look(turn)
        following = self._choose()
        if following is not turn and following is not None:
            state, mode, switches = State.now(), self._modes.now(), self._switches.now()
            self._views.leave(turn)
            if following in self._starts:
                _employ(self._work, following)
            else:
                following.may_go.release()
            turn.may_go.acquire()
            state.restore()
            self._modes.put_back(mode)
            self._switches.put_back(switches)
            self._views.enter(turn)
        if self._error is not None:
            raise Abandoned

    def _choose(self) -> Turn | None:
        """Who goes on, as soon as anybody can; None if all are done."""
        try:
            while self._error is None and (self._to_begin or self._begun):
                # The youngest is looked at first: a message that comes meanwhile must not let it pass an older one,
                # whose message came before, for a module's buffers are to see micro-batches in their order.
                arrived = {
                    turn for turn in reversed(self._begun) if turn.key is not None and self._mailbox.has(turn.key)
                }
                best = self._best(arrived)
                if best is not None:
                    return best
                if self._owed:
                    turn, turn.work = self._owed.popleft()
                    return turn
                self._await_letters(but=arrived)
        except Exception as error:
            self._error = self._error or error
        return self._begun[0] if self._begun else None  # after an error, to unwind

    def _best(self, arrived: Collection[Turn]) -> Turn | None:
        """Of those that can go on the one that should, which has begun from now on; None if none can."""
        held = sum(max(1, turn.program.held) for turn in self._begun if not turn.holds_nothing)
        is_full = held >= self._most_held - in_idleness(self._schedule)
        ready = [turn for turn in self._begun if self._is_ready(turn, arrived, is_full=is_full)]
        kept = held + sum(turn.stages_put_off for turn in self._begun)
        has_room = held < self._most_held and kept < self._most_kept
        if self._to_begin and has_room and self._may_begin(self._to_begin[0]):
            ready.append(self._to_begin[0])
        best = min(ready, key=lambda turn: self._preference(turn, is_full=is_full), default=None)
        if best is not None and self._to_begin and best is self._to_begin[0]:
            self._begun.append(self._to_begin.pop(0))
        return best

    def _may_begin(self, turn: Turn) -> bool:
        """Not before those of earlier groups have come to this rank's last stage, or they would have no room there."""
        if self._views.is_alone and self._begun:
            return False
        if self._in_order and not all(other.in_backward or other.is_at_backward for other in self._begun):
            return False
        ranks = self._mailbox.axis.size
        earlier = (other for other in self._begun if other.micro_batch // ranks < turn.micro_batch // ranks)
        return self._stages_here == 1 or all(
            other.in_backward or other.is_at_backward or other.program.held == self._stages_here for other in earlier
        )

    def _is_ready(self, turn: Turn, arrived: Collection[Turn], *, is_full: bool) -> bool:
        if turn.put_off_count and turn.key is None:
            return False
        if turn.is_at_backward:
            return (
                self._schedule != "gpipe"
                or self._views.is_alone
                or not (self._to_begin or any(other.backwards < turn.backwards for other in self._begun))
            )
        if turn.key is None or turn not in arrived:
            return turn.key is None
        # The oldest may always go on, for somebody must be able to.
        oldest = next((other for other in self._begun if not other.holds_nothing), turn)
        may_hold_more = not is_full or turn is oldest
        return turn.in_backward or may_hold_more or not 0 < turn.program.held < self._stages_here

    def _preference(self, turn: Turn, *, is_full: bool) -> tuple[int, ...]:
        in_backward, ranks = turn.in_backward or turn.is_at_backward, self._mailbox.axis.size
        stage = turn.program.stage_in_backward if in_backward else turn.program.stage
        return preference(turn.micro_batch, ranks, stage, in_backward=in_backward, is_full=is_full)

    def _await_letters(self, *, but: Collection[Turn]) -> None:
        """Wait until one comes that was not there; what is there already is of no use yet."""
        begin_s = now_s()
        waiting = [turn for turn in self._begun if turn.key is not None and turn not in but]
        wanted: dict[int, list[Key]] = {}
        for turn in waiting:
            if turn.key is not None:
                wanted.setdefault(turn.source, []).append(turn.key)
        self._mailbox.await_any(wanted, lambda: "; ".join(turn.purpose for turn in waiting))
        self._since_s = now_s()
        self._idle_s += self._since_s - begin_s

    def _draw(self, turn: Turn) -> None:
        """Put what ends now on the timeline."""
        begin_s, self._since_s = self._since_s, now_s()
        traffic.span("stage", f"{turn.direction} {turn.micro_batch}", begin_s, self._since_s)


class Surroundings(ExitStack):
    """What torch keeps for each thread, as it is where this is made; entered in another thread it holds there too."""

    def __init__(self) -> None:
        super().__init__()
        self._grad = torch.is_grad_enabled()
        self._hooks = _hooks_of_saved_tensors()
        self._autocast = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")
        ]
        self._modes = _get_current_function_mode_stack()
        self._device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        self._stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None

    def __enter__(self) -> Surroundings:
        super().__enter__()
        if self._device is not None:
            torch.cuda.set_device(self._device)
            self.enter_context(torch.cuda.stream(self._stream))
        # Not inference mode: its tensors do not tell what was written in them.
        self.enter_context(torch.set_grad_enabled(self._grad))
        for pack, unpack in self._hooks:
            self.enter_context(torch.autograd.graph.saved_tensors_hooks(pack, unpack))
        for kind, is_enabled, dtype in self._autocast:
            if is_enabled:
                self.enter_context(torch.autocast(kind, dtype))
        for mode in self._modes:
            self.enter_context(mode)
        return self


class _Worker:
    """A thread of this process that does one task after another; each gives the lock that wakes who is next."""

    def __init__(self) -> None:
        keep_memory()
        self._task: Callable[[], threading.Lock] | None = None
        self._has_task = threading.Lock()
        self._has_task.acquire()
        threading.Thread(target=self._do, daemon=True, name="micro-batches").start()

    def give(self, task: Callable[[], threading.Lock]) -> None:
        self._task = task
        self._has_task.release()

    def _do(self) -> None:
        while True:
            self._has_task.acquire()
            task, self._task = self._task, None
            assert task is not None, "given before it was woken"
            following = task()
            del task  # it holds the step
            _idle.append(self)  # before anybody else goes on, who might look for one
            following.release()


_idle: list[_Worker] = []


def _employ(work: Callable[..., threading.Lock], *arguments: Turn) -> None:
    """Have a thread do something."""
    try:
        worker = _idle.pop()
    except IndexError:
        worker = _Worker()
    worker.give(lambda: work(*arguments))


def _nothing() -> None:
    pass


def _hooks_of_saved_tensors() -> list[tuple[Callable[..., Any], Callable[..., Any]]]:
    """Those that hold where this is called, the outermost first."""
    found: list[tuple[Callable[..., Any], Callable[..., Any]]] = []
    while (hooks := _autograd._top_saved_tensors_default_hooks(True)) is not None:
        found.insert(0, hooks)
        _autograd._pop_saved_tensors_default_hooks()
    for hooks in found:
        _autograd._push_saved_tensors_default_hooks(*hooks)
    return found
