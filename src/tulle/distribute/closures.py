"""Losses that optimizers ask for: of the whole batch, so that replicas decide alike."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from tulle.mesh import Axis
from tulle.sync import all_reduce

Closure = Callable[..., Any]


def share_losses(optimizer: Optimizer, axis: Axis) -> None:
    """Have closures that an optimizer is given return the mean of all ranks' losses, and none where they return none.

    LBFGS ends its iterations, and searches along a line, by the loss. By a loss of its own each rank would end
    elsewhere, with other parameters, or hang.
    """
    optimizer.register_step_pre_hook(partial(_share, axis))


def _share(
    axis: Axis, _: Optimizer, arguments: tuple[Any, ...], keywords: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A hook of torch's: gets and gives the arguments of `step`, the optimizer among them."""
    return (
        tuple(_shared(one, axis) if callable(one) else one for one in arguments),
        {name: _shared(one, axis) if callable(one) else one for name, one in keywords.items()},
    )


def _shared(closure: Closure, axis: Axis) -> Closure:
    @wraps(closure)
    def mean(*arguments: Any, **keywords: Any) -> Tensor | None:
        loss = closure(*arguments, **keywords)
        return None if loss is None else all_reduce(torch.as_tensor(loss, device=axis.device).detach(), axis)

    return mean
