"""What an optimizer's step sees of gradients of parts: plain tensors, and what it keeps of them is plain, too."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

from torch import Tensor, nn
from torch.optim import Optimizer

from tulle.parts import Part, lift, lower
from tulle.step_hooks import hook_last
from tulle.tables.gradient import ShardGradient


class _Plainly:
    """Hooks of an optimizer's step, in which gradients of parts are plain: the class takes its time at each operation.

    Hooks of others are to see the class: the one after the step is the first, and the one before it does nothing unless
    it is among the last.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        hook_last(optimizer, self._before)
        after = optimizer.register_step_post_hook(self._after).id
        cast("OrderedDict[int, Any]", optimizer._optimizer_step_post_hooks).move_to_end(after, last=False)
        self._plain: list[Tensor] = []

    def _before(
        self, optimizer: Optimizer, arguments: tuple[Any, ...], keywords: dict[str, Any], others_behind: int
    ) -> None:
        self._plain.clear()
        if not others_behind and len(arguments) == 1 and not keywords:
            gradients = (parameter.grad for group in optimizer.param_groups for parameter in group["params"])
            self._plain += [gradient for gradient in gradients if type(gradient) is ShardGradient]
            for gradient in self._plain:
                gradient.__class__ = Tensor

    def _after(self, optimizer: Optimizer, *_: object) -> None:
        """Give gradients their class back; what the state keeps of those that had it in the step is plain."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if isinstance(parameter.grad, ShardGradient):
                    _make_plain(optimizer.state.get(parameter, {}))
        for gradient in self._plain:
            gradient.__class__ = ShardGradient
        self._plain.clear()


@contextmanager
def plain_in_step(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Within this context parameters, and their gradients, are plain: a step treats every number by itself."""
    lifted = lift(parameters)
    gradients: list[Tensor] = [gradient for p in parameters if type(gradient := p.grad) is ShardGradient]
    for gradient in gradients:
        gradient.__class__ = Tensor
    try:
        yield
    finally:
        for gradient in gradients:
            gradient.__class__ = ShardGradient
        lower(lifted)


def step_by_plain_gradients(optimizer: Optimizer, *, is_elementwise: bool) -> None:
    """Have gradients of parts be plain tensors while an optimizer steps that treats every number by itself.

    What the state of any other keeps of them, a moving average say, is plain after each step.
    """
    if not any(isinstance(parameter, Part) for group in optimizer.param_groups for parameter in group["params"]):
        return
    if is_elementwise:
        _Plainly(optimizer)
    else:
        optimizer.register_step_post_hook(_make_states_plain)


def _make_states_plain(optimizer: Optimizer, *_: object) -> None:
    for state in optimizer.state.values():
        _make_plain(state)


def _make_plain(state: Mapping[str, Any]) -> None:
    for value in state.values():
        if type(value) is ShardGradient:
            object.__setattr__(value, "__class__", Tensor)
            vars(value).clear()
