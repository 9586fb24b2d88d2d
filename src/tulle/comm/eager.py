"""`eager`, `untraced`: mark functions that no compiler is to trace, as they exchange with other ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch._compile import _disable_dynamo as eager  # as torch.optim does: torch.compiler.disable imports the compiler

__all__ = ["eager", "untraced"]

_Function = TypeVar("_Function", bound=Callable[..., Any])
_frames = cast("Any", torch._C)._dynamo.eval_frame


def untraced(function: _Function) -> _Function:
    """Mark a function that torch calls from C++, within a backward that a compiled function has in it say.

    Nothing is put around it, as `eager` does, which for a hook of each of a thousand parameters is 6% of a step. Where
    compiled code itself calls it, the compiler follows nevertheless.
    """
    skip = _frames._FrameAction.SKIP
    _frames.set_code_exec_strategy(function.__code__, _frames._FrameExecStrategy(skip, skip))  # and what it calls
    return function
