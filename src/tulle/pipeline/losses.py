"""`scaled`: a call of backward that begins with its losses times a micro-batch's share of the samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor


def is_backward(function: Callable[..., Any]) -> bool:
    """Whether a function of torch runs backward from losses."""
    return function is Tensor.backward or function is torch.autograd.backward


def scaled(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], scale: float) -> Any:
    """Run what a mode of torch functions sees called; a backward, which has the losses first, from scaled ones."""
    if not is_backward(function):
        return function(*args, **kwargs)
    losses, *rest = args
    begin = losses * scale if isinstance(losses, Tensor) else [loss * scale for loss in losses]
    return function(begin, *rest, **kwargs)
