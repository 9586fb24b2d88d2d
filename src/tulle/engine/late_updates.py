"""`LateUpdates`: a parameter's update waits until somebody reads the parameter, and so does the all-reduce before it.

    backward              g5  g4  g3  g2  g1
    all-reduce                [g5 g4]---->[g3 g2]---->[g1]---->
    optimizer.step()                         notes what is to be done, waits for nothing
    next forward                                      reads p1: wait for g1, update p1; reads p2: ...

At the end of backward gradients are late tensors: who looks at one (clipping, a scaler, the user) waits for its bucket.
`step()` of an optimizer that treats every element by itself leaves out those that are still late, remembers its
hyper-parameters, and makes the parameters late. Who reads one (a module, `state_dict`, a copy) has its bucket waited
for and updated by the optimizer's own code, with the hyper-parameters as they were at the step.

Source: Peng et al., *ByteScheduler* (SOSP'19), crossing the barrier between iterations; Li et al., *EmbRace* (ICPP'22),
horizontal scheduling.
"""

from __future__ import annotations

import atexit
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tulle.engine.buckets import Bucket
from tulle.engine.late_tensors import LateGradient, LateParameter, make_late, make_plain
from tulle.errors import PlanError, TulleError

Pair = tuple[nn.Parameter, Tensor]
"""A parameter and its gradient."""


@dataclass(frozen=True, slots=True)
class _Update:
    """What a step of an optimizer has still to do for parameters of one bucket."""

    optimizer: Optimizer
    groups: list[dict[str, Any]]
    """Like the optimizer's `param_groups` at the time of the step, with these parameters only."""
    pairs: list[Pair]

    def apply(self) -> None:
        """Do it, by the optimizer's own code. What the parameters have as gradients by now they keep."""
        kept = [parameter.grad for parameter, _ in self.pairs]
        groups, self.optimizer.param_groups = self.optimizer.param_groups, self.groups
        try:
            for parameter, gradient in self.pairs:
                parameter.grad = gradient
            with _neutral(self.pairs[0][1].device):
                vars(type(self.optimizer).step)["__wrapped__"](self.optimizer)  # its hooks were called at the step
        finally:
            self.optimizer.param_groups = groups
            for (parameter, _), gradient in zip(self.pairs, kept, strict=True):
                parameter.grad = gradient


class LateUpdates:
    """The updates of one model's parameters that wait."""

    def __init__(self) -> None:
        self.read: list[Bucket] = []
        """Buckets in the order in which they were made true since the last `begin`."""
        self._waiting: dict[Bucket, list[_Update]] = {}
        """What is to be done when the gradients of a bucket are there."""
        self._left_out: list[Pair] = []
        """What the step that is running does not see."""
        _living.add(self)

    def attach(self, optimizer: Optimizer, *, is_elementwise: bool) -> None:
        """Have the steps of an optimizer leave for later what is still on the way.

        Args:
            optimizer: Over parameters of the model.
            is_elementwise: Whether it treats every element by itself; another one waits for all gradients.
        """
        if is_elementwise:
            optimizer.register_step_pre_hook(self._before_step)
            optimizer.register_step_post_hook(self._after_step)
        else:
            optimizer.register_step_pre_hook(lambda *_: self.make_all_true())
        optimizer.register_state_dict_pre_hook(lambda *_: self.make_all_true())
        optimizer.register_load_state_dict_pre_hook(lambda *_: self.make_all_true())

    def begin(self) -> None:
        """A backward is over, nothing waits."""
        assert not self._waiting, "gradients that come have all that waits done first"
        self.read.clear()

    def takes(self, bucket: Bucket) -> bool:
        """Whether this rank knows all about a bucket but its values, so that it can be waited for later."""
        return not bucket.needs_flags and all(type(slot.parameter) is nn.Parameter for slot in bucket.slots)

    def postpone(self, bucket: Bucket) -> None:
        """Let a bucket be waited for when somebody looks at one of its gradients or, after a step, parameters."""
        for _, gradient in bucket.gradients:
            make_late(gradient, LateGradient, partial(self.make_true, bucket))
        self._waiting[bucket] = []

    def make_true(self, bucket: Bucket) -> None:
        """Wait for a bucket, and update its parameters if a step has asked for it.

        Raises:
            CommunicationError: If a rank is gone; the bucket stays late then, so that nobody takes an old value for a
                new one.
        """
        if bucket not in self._waiting:
            return
        bucket.finish()
        updates = self._waiting.pop(bucket)
        self.read.append(bucket)
        for parameter, gradient in bucket.gradients:
            make_plain(parameter)
            make_plain(gradient)
        for update in updates:
            update.apply()

    def make_all_true(self) -> None:
        """Wait for everything."""
        for bucket in [*self._waiting]:
            self.make_true(bucket)

    def _before_step(self, optimizer: Optimizer, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        has_closure = any(argument is not None for argument in (*arguments[1:], *keywords.values()))
        if has_closure or any(group.get("differentiable") for group in optimizer.param_groups):
            self.make_all_true()
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if isinstance(parameter, LateParameter):  # the last step's update comes before this one's
                    parameter.make_true()
        for group in optimizer.param_groups if self._waiting else ():
            self._leave_out(optimizer, group)

    def _leave_out(self, optimizer: Optimizer, group: dict[str, Any]) -> None:
        """Note the update of the parameters of one group that are still on the way, and hide their gradients."""
        late = {id(parameter) for parameter in group["params"] if isinstance(parameter.grad, LateGradient)}
        if not late:
            return
        options = deepcopy({name: value for name, value in group.items() if name != "params"})
        for bucket, updates in self._waiting.items():
            pairs = [(parameter, gradient) for parameter, gradient in bucket.gradients if id(parameter) in late]
            if pairs:
                groups = [options | {"params": [parameter for parameter, _ in pairs]}]
                updates.append(_Update(optimizer, groups, pairs))
                self._left_out += pairs
        for parameter in group["params"]:
            if id(parameter) in late:
                parameter.grad = None

    def _after_step(self, *_: Any) -> None:
        for parameter, gradient in self._left_out:
            parameter.grad = gradient
            assert isinstance(gradient, LateGradient), "nobody could look at it"
            make_late(parameter, LateParameter, gradient.make_true)
        self._left_out.clear()


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
    """As where a step is usually called: a read may come from within autocast or inference mode."""
    with torch.inference_mode(mode=False), torch.autocast(device.type, enabled=False):
        yield


_living: WeakSet[LateUpdates] = WeakSet()


@atexit.register
def _leave_none() -> None:
    """Do not leave while other ranks, which may still want to read, need this one for what is on the way."""
    if not hasattr(sys, "last_value"):  # else the others are failing too
        for updates in list(_living):
            with suppress(TulleError):
                updates.make_all_true()
