"""`Spokesman`: a parameter that lives at another stage, and yet has a gradient for whoever looks: a `Bearer`.

`torch.amp.GradScaler` refuses an optimizer without any gradient, and torch's clipping takes a norm of what is there. A
rank whose stage has no parameter of an optimizer would not hear of the others'.
"""

from __future__ import annotations

from functools import cache
from typing import Any, cast

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tulle.clip.bearer import Bearer, Burden

_WORD = "_tulle_word"


class Spokesman(nn.Parameter):
    """A parameter on device meta whose gradient is said to be a zero on another, between backward and step."""

    @classmethod
    def of(cls, parameter: nn.Parameter) -> Spokesman:
        """Turn a parameter into one; it stays the object that it is, and no optimizer steps it."""
        _silence_before_steps()
        parameter.__class__ = cls
        assert isinstance(parameter, Spokesman), "just made so"
        return parameter

    def speak(self, zero: Tensor, burden: Burden) -> None:
        """Have the gradient speak for all ranks.

        Args:
            zero: `[1]`, where the other gradients are.
            burden: What it speaks for.
        """
        setattr(self, _WORD, Bearer.of(zero, burden))

    def _said(self) -> Tensor | None:
        return getattr(self, _WORD, None)

    def _hush(self, _: None) -> None:
        setattr(self, _WORD, None)

    grad = cast("Any", property(_said, _hush))


@cache
def _silence_before_steps() -> None:
    """Have all optimizers of this process, those that will be made too, see no gradient of a spokesman."""
    register_optimizer_step_pre_hook(_silence)


def _silence(optimizer: Optimizer, *_: object) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if type(parameter) is Spokesman:
                parameter.grad = None
