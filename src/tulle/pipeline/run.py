"""`Runtime`: runs programs through the modules that are placed on an axis, within steps and outside of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from tulle.comm import eager, now_s, traffic
from tulle.errors import ModelError
from tulle.mesh import Axis
from tulle.parts import local_of
from tulle.pipeline.carried import Carried
from tulle.pipeline.graphs import is_made_by
from tulle.pipeline.holdings import Holdings, Unit
from tulle.pipeline.interception import run_in_this_thread
from tulle.pipeline.mailbox import mailbox_of
from tulle.pipeline.messages import Key, Kind, each_once
from tulle.pipeline.outcome import versioned
from tulle.pipeline.placeholder import running
from tulle.pipeline.program import Program
from tulle.pipeline.randomness import forked, seed_of
from tulle.pipeline.resident import Resident
from tulle.pipeline.results import body_of, told_to_all
from tulle.pipeline.same_batch import SameBatch
from tulle.pipeline.schedule import Schedule, is_split
from tulle.pipeline.tied import Asides
from tulle.pipeline.turn import Turn
from tulle.pipeline.turns import Turns
from tulle.pipeline.values import Values
from tulle.pipeline.views import Views

_MOST_TIED_BITS = 24
"""Of the numbers of tied parameters in messages; above them stands which backward it is, outside of steps."""
_SENDS_KEPT = 64
"""Sends to each rank that may be under way outside of steps before the oldest are waited for."""


@dataclass(slots=True)
class Step:
    """A step's calls, as `Runtime.run_step` wants them.

    Args:
        function: The user's.
        calls: Arguments and keywords of each micro-batch.
        models: That it is given, or refers to.
        residents: Of these that are placed.
        shares: What the gradients of each are multiplied with.
        schedule: In which order.
        generators: Of random numbers, that it may draw from.
    """

    function: Callable[..., Any]
    calls: Sequence[tuple[Sequence[Any], Mapping[str, Any]]]
    models: Sequence[nn.Module]
    residents: Sequence[Resident]
    shares: Sequence[float]
    schedule: Schedule
    generators: Sequence[Any]

    def __len__(self) -> int:
        return len(self.calls)


class Runtime:
    """Runs programs through all modules that are placed on an axis.

    Args:
        axis: Whose ranks hold the stages. Every rank of it must make one.
        seed: Of all random numbers that programs draw, the same on all ranks.
    """

    def __init__(self, axis: Axis, seed: int) -> None:
        self.axis, self.seed = axis, seed
        self.holdings = Holdings(mailbox_of(axis))
        self.holdings.note_frozen = self._note_frozen
        self.views = Views()
        self.models: WeakValueDictionary[int, Resident] = WeakValueDictionary()
        """By number; one that is gone is called by no program."""
        self.placed = 0
        """How many models ever were."""
        self.programs = 0
        """The last number that a program, a step or the placing of a model was given; the same on all ranks."""
        self._same_batch = SameBatch(axis)
        self._before = 0
        """How many programs more there were by the checkpoint that training goes on from."""
        self.ran = set[int]()
        """Numbers of the models that the last step called, or read parameters of; the same on all ranks."""
        self.bubble = 0.0
        """Share of the last step in which this rank had nothing that it could do."""
        self._current: Program | None = None
        self._number, self._backwards = 0, 0
        """Of the program outside of steps, and how often backward ran in it; a rank may fail before it does."""
        self._asides = Asides(self.models, self.holdings.mailbox)

    @property
    def stages(self) -> int:
        """How many there are, of the model that has most."""
        return max((model.stages for model in self.models.values()), default=1)

    def call_unit(self, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A placed module was called."""
        program = running.get()
        program = program if isinstance(program, Program) else self._outside_of_steps((args, kwargs))
        return program.call_unit(unit, args, kwargs)

    @eager
    def call_model(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A model was called: within a step as a part of its program, else as one of its own."""
        if (program := running.get()) is not None:
            is_of_step = isinstance(program, Program)
            return program.adopted.in_forward(call, args, kwargs) if is_of_step else call(*args, **kwargs)
        self._note_frozen()
        program = self._outside_of_steps((args, kwargs))
        try:
            with forked(seed_of(program.seed, program.count_call())), versioned(), run_in_this_thread(program):
                result = call(*args, **kwargs)
            with versioned():
                self._even_out(may_need_grad=True)
            return program.visible(result)
        except BaseException as error:
            self._fail(error)
            raise

    def run_step(self, step: Step) -> list[Any]:
        """Run a step function for each micro-batch. Every rank must call it, alike.

        Returns:
            What each call returned, with plain tensors on all ranks.

        Raises:
            ModelError: If a step runs already, whose program would wait for this one's.
        """
        if running.get() is not None:
            raise ModelError(
                "a function of tulle.step was called within another one, or within a model's forward, where "
                "micro-batches run already: call what it decorates (function.__wrapped__), or one after the other"
            )
        mailbox, begin_s = self.holdings.mailbox, now_s()
        self._note_frozen()
        self._current = None
        carried = {number: model.carried for number, model in self.models.items()}
        turns = [self._turn(step, index) for index in range(len(step))]
        programs = [turn.program for turn in turns]
        number = self._next_number()  # taken before anything can fail, or ranks would count apart
        mailbox.open(number)
        try:
            for resident in step.residents:
                resident.carried.is_idle = False
            for one in carried.values():
                one.begin()
            in_order = self._is_any(bool(step.generators) or any(one.is_likely for one in carried.values()))
            stages = max((resident.stages for resident in step.residents), default=self.stages)
            modes, views = self.holdings.modes, self.views
            left = [one.left for one in carried.values()] if in_order else []
            with (
                modes.step(module for model in self.models.values() for module in model.modules),
                views.step(step.function, left, step.generators, self._is_any, asks_peers=mailbox.asks_peers),
            ):
                idle_s = Turns(turns, mailbox, step.schedule, stages, in_order=in_order, modes=modes, views=views).run()
            self.ran = set[int]().union(*(program.models for program in programs))
            self._see_what_is_carried(carried, programs)
            self._asides.add_up(self.ran, programs, number)
            self._even_out(number)
            self.holdings.forget_calls()
            began_s = now_s()
            results = told_to_all([turn.result for turn in turns], mailbox, number)
            idle_s += now_s() - began_s
        except BaseException as error:
            self._asides.undo()
            self.holdings.is_full = False
            self.holdings.changed.clear()  # others may have come further
            mailbox.close(error)
            raise
        end_s = now_s()
        self.holdings.is_full = False  # also if another rank failed
        self.holdings.count_calls(self._same_batch.end_step(mailbox, step.calls, len(self.holdings.calls)))
        idle_s += now_s() - end_s  # the last ranks are done before the first ones
        self.bubble = idle_s / max(now_s() - begin_s, 1e-9)
        traffic.span("step", f"bubble {self.bubble:.0%}", begin_s, now_s())
        return results

    def _see_what_is_carried(self, carried: Mapping[int, Carried], programs: Sequence[Program]) -> None:
        is_kept = any(program.is_kept for program in programs)
        for number, one in carried.items():
            if number in self.ran:
                one.end(is_kept=is_kept)
            else:
                one.is_idle = True

    def copy_from_first(self, tensor: Tensor, ranks: Sequence[int], number: tuple[int, int], name: str) -> None:
        """Overwrite a tensor that several ranks hold with the first one's. Every one of them must call it.

        Args:
            tensor: This rank's.
            ranks: That hold it, the one whose values count first.
            number: Of the message: what `Key` has after the kind, the same on all ranks and in no other message.
            name: Of the tensor, for errors.
        """
        key: Key = (Kind.VALUE, *number)
        mailbox, me = self.holdings.mailbox, self.axis.rank
        written = each_once(tensor) if tensor.layout == torch.strided else tensor
        if me == ranks[0]:
            mailbox.send(key, written, to=ranks[1:])
        elif me in ranks:
            mailbox.await_any({ranks[0]: [key]}, lambda: f"the first value of {name!r}")
            written.copy_(mailbox.take(key))

    def _turn(self, step: Step, micro_batch: int) -> Turn:
        number = self._next_number()
        turn = Turn(micro_batch)
        later = turn if is_split(step.schedule) else None
        wait = turn.wait if micro_batch else partial(self._look_and_wait, turn)
        values = Values(number, self.holdings, wait, f"micro-batch {micro_batch} of step {traffic.step}", later)
        seed, scale = self._stream(number), step.shares[micro_batch]
        program = Program(
            values, self.holdings, seed=seed, around_backward=partial(self._backward_of, turn), scale=scale
        )
        turn.begin(program, body_of(step.function, *step.calls[micro_batch], turn, program))
        return turn

    def _outside_of_steps(self, given: object) -> Program:
        """The program that runs now, or a new one if nothing of the last waits for its backward, or is given.

        If something does, it goes on, for one backward may go through several calls. What a rank has of calls of which
        nothing is left is gone by itself.
        """
        if self._current is not None and (self._current.has_graph or is_made_by(self._current, given)):
            if self._current.is_between_modules:
                self._current.cut_off()
                self.holdings.mailbox.flush(but=_SENDS_KEPT)
        else:
            number = self._next_number()
            self._number, self._backwards = number, 0
            self.holdings.mailbox.begin(number)
            self.holdings.mailbox.flush(but=_SENDS_KEPT)
            values = Values(number, self.holdings, self._wait, "a call outside of steps", walk=self.holdings.walk)
            self._current = Program(
                values,
                self.holdings,
                seed=self._stream(number),
                around_backward=self._backward_outside_of_steps,
                fail=self._fail,
            )
        return self._current

    @contextmanager
    def _backward_outside_of_steps(self) -> Iterator[None]:
        self._asides.begin(self._current)
        self._backwards += 1
        try:
            yield
            if (program := self._current) is not None:
                first = self._backwards << _MOST_TIED_BITS
                self._asides.add_up(program.models, [program], -self._number, first=first)
            self._even_out()
        except BaseException as error:
            self._asides.undo()
            self._fail(error)
            raise

    def _fail(self, error: BaseException) -> None:
        """Outside of steps: tell the others, who may wait for this rank, and begin anew with the next call."""
        if self._current is not None:
            self._current = None
            self.holdings.met.clear()  # others may have come further
            self.holdings.changed.clear()
            self.holdings.mailbox.tell(error)

    def _wait(self, key: Key, source: int, purpose: str) -> None:
        mailbox = self.holdings.mailbox
        if mailbox.has(key):
            return
        try:
            mailbox.await_any({source: [key]}, lambda: purpose)
        except BaseException as error:
            self._fail(error)
            raise

    def _is_any(self, here: bool) -> bool:  # noqa: FBT001 - what is asked
        """Whether something is so on any of the ranks that hold replicas of this one's stages."""
        return here

    @contextmanager
    def _backward_of(self, turn: Turn) -> Iterator[None]:
        self._asides.begin(turn.program)  # not before: a step may begin with zero_grad
        self._look_for_what_is_left()
        with turn.backward():
            yield

    def _look_for_what_is_left(self) -> None:
        for model in self.models.values():
            model.carried.look()

    def _look_and_wait(self, turn: Turn, key: Key, source: int, purpose: str) -> None:
        """The first micro-batch waits: see what others would find that run meanwhile, and that it may put back."""
        if not turn.in_backward:
            self._look_for_what_is_left()
        turn.wait(key, source, purpose)

    def _even_out(self, number: int | None = None, *, may_need_grad: bool = False) -> None:
        """Have all ranks hold what one of them has written in buffers of no unit, or put in their places.

        Args:
            number: Of the messages; default one of their own, if there are any.
            may_need_grad: Whether a backward may come yet, to what was put there.
        """
        replaced = [
            (model, *found)
            for model, resident in sorted(self.models.items())
            for found in resident.carried.replaced()
            if not (may_need_grad and found[-1].needs_grad)
        ]
        if not replaced and not self.holdings.changed:
            return
        number = self._next_number() if number is None else number
        messages = itertools.count(1)
        for model, name, buffers, key, value in replaced:
            home = value.stage % self.axis.size
            local = value.local if self.axis.rank == home else None
            empty = partial(torch.empty, value.shape, dtype=value.dtype, device=value.device)
            tensor = empty() if local is None else local_of(local)
            self._copy_to_all(tensor, home, (number, next(messages)), name)
            self.holdings.replace(tensor, model, name)
            buffers[key] = tensor
        for (_, name), tensor in sorted(self.holdings.changed.items(), key=lambda item: item[0]):
            self._copy_to_all(tensor, self.holdings.stages[id(tensor)] % self.axis.size, (number, next(messages)), name)
        self.holdings.changed.clear()

    def _copy_to_all(self, tensor: Tensor, home: int, number: tuple[int, int], name: str) -> None:
        others = [rank for rank in range(self.axis.size) if rank != home]
        self.copy_from_first(tensor, [home, *others], number, name)

    def next_model(self) -> int:
        """The number of a model that is placed now; what failed before it does not concern it."""
        self.holdings.mailbox.begin(self._next_number())
        self.placed += 1
        return self.placed

    def _next_number(self) -> int:
        self.programs += 1
        return self.programs

    @property
    def drawn(self) -> tuple[int, int]:
        """The seed, and the number of the last program: what random numbers to come depend on."""
        return self.seed, self._before + self.programs

    def draw_on(self, seed: int, programs: int) -> None:
        """Go on with the random numbers of a run that has `drawn` so far. All ranks of the axis must call it, alike."""
        self.seed, self._before = seed, programs - self.programs

    def _stream(self, number: int) -> int:
        return seed_of(self.seed, self._before + number)

    def _note_frozen(self) -> None:
        with torch._C.DisableTorchFunctionSubclass():  # of parts, and of what lives elsewhere
            needed = {n: bytes(p.requires_grad for p in model.parameters) for n, model in self.models.items()}
        self.holdings.frozen |= {number: seed_of(one) for number, one in needed.items()}


def runtime_of(axis: Axis, seed: int = 0) -> Runtime:
    """The run-time of an axis, made once. Every rank of the axis must call it."""
    if Runtime not in axis.kept:
        axis.kept[Runtime] = Runtime(axis, seed)
    return axis.kept[Runtime]
