"""`LateUpdates`: a parameter's update waits until somebody reads the parameter, and so does the all-reduce before it.

    backward              g5  g4  g3  g2  g1
    all-reduce                [g5 g4]---->[g3 g2]---->[g1]---->
    optimizer.step()                         notes what is to be done, waits for nothing
    next forward                                      reads p1: wait for g1, update p1; reads p2: ...

At the end of backward gradients are late tensors: who looks at one (clipping, a scaler, the user) waits for its bucket.
`step()` of an optimizer that treats every element by itself leaves out those that are still late, remembers its
hyper-parameters, and makes the parameters late. Who reads one (a module, `state_dict`, a copy), or what the optimizer
keeps of it (`tulle.engine.late_states`), has its bucket waited for and updated by the optimizer's own code, with the
hyper-parameters as they were at the step. The same holds for parts of split tables of which not all rows have come
(`tulle.engine.late_tables`).

Source: Peng et al., *ByteScheduler* (SOSP'19), crossing the barrier between iterations; Li et al., *EmbRace* (ICPP'22),
horizontal scheduling.
"""

from __future__ import annotations

import atexit
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from threading import Event
from typing import Any, Protocol
from weakref import WeakSet, ref

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from tulle.board import is_failing
from tulle.engine.buckets import Bucket
from tulle.engine.late_states import LateState
from tulle.engine.late_tables import LateTable
from tulle.engine.late_tensors import COMPILED, LateParameter, is_late, make_late, make_plain
from tulle.errors import PlanError, TulleError
from tulle.parts import local_of
from tulle.step_hooks import hook_last
from tulle.tables import plain_in_step

Pair = tuple[nn.Parameter, Tensor]
"""A parameter and its gradient."""


class Awaited(Protocol):
    """Gradients that are on the way: a bucket, or those of a table."""

    @property
    def gradients(self) -> list[Pair]:
        """Each parameter and its gradient."""
        ...

    def finish(self) -> None:
        """Wait for the values."""
        ...

    def alone(self) -> Callable[[Tensor], object]:
        """What completes one gradient when its parameter may be gone, which it does not hold."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class _Update:
    """What a step of an optimizer has still to do for parameters of which the gradients come together."""

    optimizer: Optimizer
    options: dict[str, Any]
    """Those of the parameters' group at the time of the step."""
    state: LateState
    """The optimizer's at that time."""
    pairs: list[Pair]

    def apply(self) -> None:
        """Do it. What the parameters have as gradients by now they keep; they count as written since the step."""
        parameters = [parameter for parameter, _ in self.pairs]
        kept = [parameter.grad for parameter in parameters]
        try:
            for parameter, gradient in self.pairs:
                parameter.grad = gradient
            with _unsafe_preserve_version_counter(tuple(parameters)):
                self._step(parameters)
        finally:
            for parameter, gradient in zip(parameters, kept, strict=True):
                parameter.grad = gradient

    def ahead(self, places: Tensor, gradient: Tensor) -> Tensor:
        """What rows of the one parameter will be, found on a copy of them and their state.

        Args:
            places: `[rows]` which.
            gradient: `[rows, width]`, theirs.
        """
        [(parameter, _)] = self.pairs
        with torch._C.DisableTorchFunctionSubclass():  # as it was at the step
            rows = nn.Parameter(parameter.detach().index_select(0, places))
            state = {
                name: value.index_select(0, places) if _is_like(value, parameter) else deepcopy(value)
                for name, value in self.state.as_it_is(parameter).items()
            }
        rows.grad = gradient
        if state:
            self.state[rows] = state
        try:
            self._step([rows])
        finally:
            self.state.pop(rows, None)
        return rows.detach()

    def _step(self, parameters: list[nn.Parameter]) -> None:
        """By the optimizer's own code, within all that torch wraps it in: its hooks were called at the step."""
        groups, self.optimizer.param_groups = self.optimizer.param_groups, [self.options | {"params": parameters}]
        state, self.optimizer.state = self.optimizer.state, self.state
        try:
            with _neutral(parameters[0].device), plain_in_step(parameters):
                inspect.unwrap(type(self.optimizer).step)(self.optimizer)
        finally:
            self.optimizer.param_groups, self.optimizer.state = groups, state


class LateUpdates:
    """The updates of one model's parameters that wait."""

    def __init__(self) -> None:
        self.read: list[Bucket] = []
        """Buckets in the order in which they were made true since the last `begin`."""
        self.are_replicas_read = Event()
        """Set while no bucket waits: then what travels without anybody who waits for it may follow."""
        self.are_replicas_read.set()
        self._waiting: dict[Awaited, list[_Update]] = {}
        """What is to be done when gradients are there."""
        self._left_out: list[tuple[Awaited, _Update]] = []
        """What the step that is running does not see, and what it waits for."""
        _living.add(self)
        atexit.unregister(_leave_none)
        atexit.register(_leave_none)  # runs before what ends the process groups, which was registered earlier

    def attach(self, optimizer: Optimizer, *, is_elementwise: bool) -> None:
        """Have the steps of an optimizer leave for later what is still on the way.

        Args:
            optimizer: Over parameters of the model.
            is_elementwise: Whether it treats every element by itself; another one waits for all gradients.
        """
        if is_elementwise:
            hook_last(optimizer, self._before_step)
            optimizer.register_step_post_hook(self._after_step)
        else:
            optimizer.register_step_pre_hook(lambda *_: self.make_all_true())
        optimizer.register_state_dict_pre_hook(lambda *_: self.make_all_true())
        optimizer.register_load_state_dict_pre_hook(lambda *_: self.make_all_true())

    def begin(self) -> None:
        """A backward is over, no bucket waits."""
        assert not self._buckets(), "gradients that come have all that waits done first"
        self.read.clear()

    def takes(self, bucket: Bucket) -> bool:
        """Whether this rank knows all about a bucket but its values, so that it can be waited for later."""
        return not bucket.needs_flags and all(type(slot.parameter) is nn.Parameter for slot in bucket.slots)

    def postpone(self, awaited: Awaited) -> None:
        """Let gradients be waited for when somebody looks at one of them or, after a step, at their parameters."""
        for _, gradient in awaited.gradients:
            # A parameter holds its gradient where no garbage collector sees it, so this must not hold the parameter.
            make_late(gradient, partial(_complete, ref(self), ref(awaited), awaited.alone()))
        self._waiting[awaited] = []
        if isinstance(awaited, Bucket):
            self.are_replicas_read.clear()

    def make_true(self, awaited: Awaited) -> None:
        """Wait for gradients, and update their parameters if a step has asked for it.

        Raises:
            CommunicationError: If a rank is gone; the tensors stay late then, so that nobody takes an old value for a
                new one.
        """
        if awaited not in self._waiting:
            return
        awaited.finish()
        updates = self._waiting.pop(awaited)
        if isinstance(awaited, Bucket):
            self.read.append(awaited)
            if not any(isinstance(other, Bucket) for other in self._waiting):
                self.are_replicas_read.set()
        for parameter, gradient in awaited.gradients:
            if updates:  # else what waits may be the last step's
                make_plain(parameter)
            make_plain(gradient)
        for update in updates:
            update.apply()

    def make_replicas_true(self) -> None:
        """Wait for the gradients of replicas, to which autograd adds unasked."""
        self._undo()
        for bucket in self._buckets():
            self.make_true(bucket)

    def make_all_true(self) -> None:
        """Wait for everything."""
        for awaited in [*self._waiting]:
            self.make_true(awaited)

    def replace(self, before: LateTable | None, table: LateTable) -> None:
        """Postpone a table's gradient; of the one before nothing is left to do but what a step has asked for."""
        if before is not None and not self._waiting.get(before):
            self.make_true(before)
        self.postpone(table)

    def ahead(self, table: LateTable, places: Tensor) -> Tensor:
        """Rows that lie at some places of a table, none of them delayed, as they are when its update is done."""
        updates = self._waiting.get(table)
        if not updates:  # no step has asked for it, or all is done
            [(parameter, _)] = table.gradients
            return local_of(parameter).index_select(0, places)
        [update] = updates
        return update.ahead(places.long(), table.ahead(places))

    def _buckets(self) -> list[Bucket]:
        return [awaited for awaited in self._waiting if isinstance(awaited, Bucket)]

    def _before_step(self, optimizer: Optimizer, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        for parameter, gradient in self._undo():
            if parameter.grad is None and is_late(gradient):  # no backward has come since
                parameter.grad = gradient
        has_closure = any(argument is not None for argument in (*arguments[1:], *keywords.values()))
        if has_closure or any(group.get("differentiable") or _repeats(group) for group in optimizer.param_groups):
            self.make_all_true()
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if isinstance(parameter, LateParameter):  # the last step's update comes before this one's
                    parameter.make_true()
        if type(optimizer.state) is not LateState:  # at first, and where somebody has put another in its place
            optimizer.state = LateState(optimizer.state, self.make_all_true)
        self._leave_out(optimizer, optimizer.state)

    def _undo(self) -> list[Pair]:
        """Of a step that failed nothing is to be done: gives what it was not to see."""
        pairs = [pair for _, update in self._left_out for pair in update.pairs]
        for awaited, failed in self._left_out:
            if failed in (updates := self._waiting.get(awaited, [])):
                updates.remove(failed)
        self._left_out.clear()
        return pairs

    def _leave_out(self, optimizer: Optimizer, state: LateState) -> None:
        """Note the updates of parameters that are still on the way, and hide their gradients."""
        groups = [*enumerate(optimizer.param_groups)] if self._waiting else []
        numbers = {id(parameter): number for number, group in groups for parameter in group["params"]}
        options: dict[int, dict[str, Any]] = {}
        for awaited, updates in self._waiting.items():
            late: dict[int, list[Pair]] = {}
            for parameter, gradient in awaited.gradients:
                if id(parameter) in numbers and parameter.grad is gradient:
                    late.setdefault(numbers[id(parameter)], []).append((parameter, gradient))
                    parameter.grad = None
                    increment_version(parameter)  # now, not when it is done: who holds values knows that they are old
            for number, pairs in late.items():
                if number not in options:
                    options[number] = _options(optimizer.param_groups[number])
                updates.append(_Update(optimizer, options[number], state, pairs))
                self._left_out.append((awaited, updates[-1]))

    def _after_step(self, *_: object) -> None:
        for awaited, update in self._left_out:
            for parameter, gradient in update.pairs:
                parameter.grad = gradient
                if not is_late(gradient):  # a compiled step has looked at what it was not to see
                    self._left_out.clear()
                    raise PlanError(COMPILED)
                make_late(parameter, partial(_make_true, self, awaited))
        self._left_out.clear()


def _make_true(late: LateUpdates, awaited: Awaited, parameter: Tensor) -> None:
    late.make_true(awaited)


def _complete(
    late: ref[LateUpdates], awaited: ref[Awaited], alone: Callable[[Tensor], object], gradient: Tensor
) -> None:
    updates, waiting = late(), awaited()
    if updates is not None and waiting is not None:
        updates.make_true(waiting)
    else:  # the model is gone, and nothing is to be updated
        alone(gradient)
        make_plain(gradient)


def _repeats(group: dict[str, Any]) -> bool:
    """Whether a parameter is in it twice, as where two models that share it are chained: it is stepped twice."""
    return len(group["params"]) > len({id(parameter) for parameter in group["params"]})


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return deepcopy({name: value for name, value in group.items() if name != "params"})


def _is_like(value: object, parameter: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == parameter.shape


def check_reads(model: nn.Module) -> None:
    """Raise if the model reads parameters where nobody can see it, so that their updates cannot wait for that.

    Raises:
        PlanError: Naming the module.
    """
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise PlanError(
                f"the plan has updates wait until parameters are read, but the scripted module {name!r} "
                "reads its own unseen: give the plan with schedule='step', or the module as it was before torch.jit"
            )


@contextmanager
def _neutral(device: torch.device) -> Iterator[None]:
    """As within a step: a read may come from within autocast or inference mode."""
    with torch.inference_mode(mode=False), torch.no_grad(), torch.autocast(device.type, enabled=False):
        yield


_living: WeakSet[LateUpdates] = WeakSet()


def _leave_none() -> None:
    """Do not leave while other ranks, which may still want to read, need this one for what is on the way."""
    if not is_failing():  # else the others are failing too
        for updates in list(_living):
            with suppress(TulleError):
                updates.make_all_true()
