"""Hooks of a part's gradient are given what knows that it is a part's.

    weight.register_hook(lambda gradient: gradient / gradient.norm())
    weight.register_post_accumulate_grad_hook(lambda weight: weight.grad.clamp_(max=weight.grad.norm()))
    table.register_hook(forget_the_first_row)

Of plain tensors the first two would take norms of parts, other ones on each rank, and the third another row. Norms are
those of the whole, for which every rank must ask, and what goes by place is refused, as of `.grad` after backward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from tulle.errors import GradientError
from tulle.parts.wholes import PART_OF, Whole, shape_of_whole

_GRADIENT: Any = vars(torch._C.TensorBase)["grad"]

Make = TypeVar("Make", bound=Callable[[Tensor, Whole], Any])
_makers: list[Callable[[Tensor, Whole], Any]] = []


def make_gradients_by(make: Make) -> Make:
    """Have what became of parts, and is given to a parameter for its gradient, be what gradients of parts are."""
    _makers.append(make)
    return make


def become_gradient(tensor: Tensor, whole: Whole) -> None:
    """Have a tensor be the gradient of a part; it stays the object that it is."""
    for make in _makers:
        make(tensor, whole)


def gradient_of(part: Tensor) -> Tensor | None:
    """The gradient of a part, as it is."""
    with torch._C.DisableTorchFunctionSubclass():
        return _GRADIENT.__get__(part)


def give_gradient(part: Tensor, gradient: Tensor | None) -> None:
    """Have a part have a gradient; what became of parts is that of a part then.

    Raises:
        GradientError: If the gradient is as large as all of it.
    """
    if hasattr(gradient, PART_OF) and not isinstance(gradient, nn.Parameter):
        become_gradient(cast("Tensor", gradient), getattr(gradient, PART_OF))
    with torch._C.DisableTorchFunctionSubclass():
        try:
            _GRADIENT.__set__(part, gradient)
        except RuntimeError as error:
            if not isinstance(gradient, Tensor) or tuple(gradient.shape) != shape_of_whole(part):
                raise
            raise GradientError(
                f"a gradient of shape {list(gradient.shape)} was given to a parameter of that shape of which this rank "
                f"has a part, {list(part.shape)}: write in the gradient that is there (.grad.clamp_(-1, 1), or of a "
                "sparse one .grad.values()), which is of the same part, or make one as large as .to_local()"
            ) from error


def guard_gradient(part: Tensor) -> None:
    """Have what backward gave a copy, of which no engine knows, be the gradient of a part."""
    gradient = gradient_of(part)
    if type(gradient) is Tensor:
        become_gradient(gradient, getattr(part, PART_OF))


@dataclass(frozen=True, slots=True)
class OfGradient:
    """A hook of `register_hook`, which gets a gradient and may give another."""

    hook: Callable[[Tensor], Tensor | None]
    whole: Whole

    def __call__(self, gradient: Tensor) -> Tensor | None:
        """Call it with a gradient of a part, and give plain tensors back to autograd."""
        if type(gradient) is not Tensor or gradient.layout != torch.strided:
            return self.hook(gradient)
        given = gradient.view_as(gradient)
        become_gradient(given, self.whole)
        found = self.hook(given)
        with torch._C.DisableTorchFunctionSubclass():
            return found.view_as(found) if isinstance(found, Tensor) else found


@dataclass(frozen=True, slots=True)
class OfParameter:
    """A hook of `register_post_accumulate_grad_hook`, which gets the parameter."""

    hook: Callable[[Tensor], None]
    whole: Whole

    def __call__(self, part: Tensor) -> None:
        """Call it while the parameter's gradient knows; for who averages it, it is as it was afterwards."""
        gradient = part.grad
        if type(gradient) is not Tensor or gradient.layout != torch.strided:
            return self.hook(part)
        become_gradient(gradient, self.whole)
        try:
            self.hook(part)
        finally:
            object.__setattr__(gradient, "__class__", Tensor)


def tell_hooks(parameter: nn.Parameter, whole: Whole) -> None:
    """Have the hooks that somebody has put on a parameter's gradient know that it is a part's."""
    _tell(parameter._backward_hooks, OfGradient, whole)
    _tell(parameter._post_accumulate_grad_hooks, OfParameter, whole)


def _tell(hooks: dict[int, Any] | None, kind: Any, whole: Whole) -> None:
    if hooks is not None:
        own = {number: hook.hook if isinstance(hook, kind) else hook for number, hook in hooks.items()}
        hooks |= {number: kind(hook, whole) for number, hook in own.items()}


def hook_arrival(parameter: Tensor, hook: Callable[[Tensor], Any]) -> RemovableHandle:
    """`register_post_accumulate_grad_hook` for who averages gradients, and takes those of parts as they are."""
    return Tensor.register_post_accumulate_grad_hook(parameter, hook)
