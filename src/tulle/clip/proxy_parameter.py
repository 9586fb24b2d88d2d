"""`ProxyParameter`: a parameter of another stage that has a gradient here nevertheless, a `ProxyGradient`.

`torch.amp.GradScaler` refuses an optimizer without any gradient, and torch's clipping takes a norm of what is there. A
rank whose stage has no parameter of an optimizer would not hear of the others'.
"""

from __future__ import annotations

from functools import cache
from typing import Any, cast

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tulle.clip.proxy import Proxied, ProxyGradient

_GRADIENT = "_tulle_proxy"


class ProxyParameter(nn.Parameter):
    """A parameter on device meta whose gradient is said to be a zero on another, between backward and step."""

    @classmethod
    def of(cls, parameter: nn.Parameter) -> ProxyParameter:
        """Turn a parameter into one; it stays the object that it is, and no optimizer steps it."""
        _hide_before_steps()
        parameter.__class__ = cls
        assert isinstance(parameter, ProxyParameter), "just made so"
        return parameter

    def set_gradient(self, zero: Tensor, proxied: Proxied) -> None:
        """Give it a gradient that answers for all ranks'.

        Args:
            zero: `[1]`, where the other gradients are.
            proxied: What it stands for.
        """
        setattr(self, _GRADIENT, ProxyGradient.of(zero, proxied))

    def _get(self) -> Tensor | None:
        return getattr(self, _GRADIENT, None)

    def _clear(self, _: None) -> None:
        setattr(self, _GRADIENT, None)

    grad = cast("Any", property(_get, _clear))


@cache
def _hide_before_steps() -> None:
    """Have all optimizers of this process, those that will be made too, see no gradient of a proxy parameter."""
    register_optimizer_step_pre_hook(_hide)


def _hide(optimizer: Optimizer, *_: object) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if type(parameter) is ProxyParameter:
                parameter.grad = None
