"""`Part`: a parameter that holds a part of what it stands for, and is not to be taken for the whole.

A rank holds some rows of a split table, in an order of their own, or some columns, or its share of a weight that is
shared out, or of a layer that is split. What treats every number by itself (an optimizer, weight decay, a penalty, a
moving average, a mask) does to the part what it would do to the whole, and what goes along other dimensions than the
one that is cut (`F.normalize(weight, dim=1)`, `weight.norm(dim=1)`) gives a part, too. What would take a part for all,

    hidden @ words.weight.T,  F.linear(hidden, words.weight),  words.weight[3],  words.weight.detach().numpy()

is given all, where what the part is of can gather it, and raises where not, as what draws numbers anew does. One number
of all (`weight.norm()`, `weight.data.abs().max()`) is that of the whole; sums, means and norms have gradients. Every
rank must ask. `parameter.to_local()` is for who knows that only a part lies here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

from torch import Tensor, nn

from tulle.parts.guards import Guarded, guards
from tulle.parts.hooks import (
    OfGradient,
    OfParameter,
    give_gradient,
    gradient_of,
    guard_gradient,
    hook_arrival,
    tell_hooks,
)
from tulle.parts.wholes import PART_OF, Whole


@guards
class Part(Guarded, nn.Parameter):
    """A parameter that holds a part of what it stands for."""

    # Each step asks for it several times; by way of `__torch_function__` that takes four times as long.
    grad = cast("Any", property(gradient_of, give_gradient, partial(give_gradient, gradient=None)))

    def register_hook(self, hook: Callable[[Tensor], Any]) -> Any:
        """As of any parameter; the hook is given what knows that it is a part's gradient."""
        return super().register_hook(OfGradient(hook, getattr(self, PART_OF)))

    def register_post_accumulate_grad_hook(self, hook: Callable[[Tensor], None]) -> Any:
        """As of any parameter; to the hook `.grad` knows that it is a part's."""
        return super().register_post_accumulate_grad_hook(OfParameter(hook, getattr(self, PART_OF)))

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """One that holds a part of the same, with numbers of its own."""
        copied = nn.Parameter(self.to_local().clone(), self.requires_grad)
        guard(copied, getattr(self, PART_OF))
        if copied.requires_grad:
            hook_arrival(copied, guard_gradient)
        return memo.setdefault(id(self), copied)


def guard(parameter: nn.Parameter, whole: Whole) -> None:
    """Guard a plain parameter that holds a part; it stays the object that it is.

    Example:
        >>> import torch
        >>> class Halves:
        ...     dims = [0]
        ...     def refusal(self, taker): return f"{taker} was given half of it"
        ...     def refusal_of_gradient(self): return None
        ...     def over(self, number, op): return 2 * number  # of two ranks that have the same
        ...     def held(self): return None
        ...     layout, shape, count, axes, is_gathered = "halves", (4, 4), 16, ["ranks"], False
        >>> weight = nn.Parameter(torch.ones(2, 4))
        >>> guard(weight, Halves())
        >>> (2 * weight).sum().item()
        32.0
        >>> torch.ones(1, 4) @ weight.T
        Traceback (most recent call last):
            ...
        tulle.errors.ModelError: T was given half of it
    """
    setattr(parameter, PART_OF, whole)
    tell_hooks(parameter, whole)
    if type(parameter) is nn.Parameter:
        object.__setattr__(parameter, "__class__", Part)


def whole_of(parameter: Tensor) -> Whole | None:
    """What a guarded parameter holds a part of; None of a plain one."""
    return getattr(parameter, PART_OF, None) if isinstance(parameter, Part) else None
