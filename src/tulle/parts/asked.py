"""How large a part is: as large as the whole to a program that asks, and what lies here to torch and tulle.

A program that divides by `weight.shape[0]`, cuts by it or makes a tensor of it knows of no parts. In the step of an
optimizer of its own it may make states by it, which are of this rank's part.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType

import torch
from torch import Tensor

from tulle.parts.reductions import Together

COUNTS = frozenset({torch.numel, Tensor.numel, Tensor.nelement})
"""What asks for the number of numbers."""
SHAPES = frozenset({vars(torch._C.TensorBase)["shape"].__get__, Tensor.size, Tensor.__len__})
"""What asks for the shape, or a length of it."""
_ON_THE_WAY = frozenset({"__torch_function__", "answer_of_whole", "asks_of_whole", "__len__", "handle_torch_function"})
"""Functions between who asks and here; `len(part)` goes by way of torch."""
_stepping: set[int] = set()
"""Optimizers of one's own that are in their step."""


def counted(part: Tensor, together: Callable[[], Together]) -> int:
    """What a function of `COUNTS` gives, called from `__torch_function__`: of the whole to torch, too.

    Args:
        part: The tensor.
        together: How ranks make one number of theirs, where nobody knows how many the whole has: every rank must ask.
    """
    with torch._C.DisableTorchFunctionSubclass():
        return part.numel() if _who_asks() == "tulle" else round(together().numbers(part))


def asks_of_whole() -> bool:
    """Whether a program asks, called from where a function of `SHAPES` is answered."""
    return not _stepping and not torch.compiler.is_compiling() and _who_asks() not in ("tulle", "torch")


def begin_step(optimizer: object) -> None:
    """An optimizer of one's own begins its step."""
    _stepping.add(id(optimizer))


def end_step(optimizer: object) -> None:
    """It has ended, or failed."""
    _stepping.discard(id(optimizer))


def _who_asks() -> str:
    """The package whose code asks."""
    frame: FrameType = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_name in _ON_THE_WAY:
        frame = frame.f_back
    return str(frame.f_globals.get("__name__")).split(".")[0]
