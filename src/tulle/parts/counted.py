"""How many numbers a part has: those of the whole to whoever asks, as to loops that divide a sum of all by it.

A part's shape is its own, for tensors that are made like it. What tulle itself asks for is what lies here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from torch import Tensor

from tulle.parts.reductions import Together

COUNTS = frozenset({torch.numel, Tensor.numel, Tensor.nelement})
"""What asks for it."""


def counted(part: Tensor, together: Callable[[], Together]) -> int:
    """What a function of `COUNTS` gives, called from `__torch_function__`.

    Args:
        part: The tensor.
        together: How ranks make one number of theirs, where nobody knows how many the whole has: every rank must ask.
    """
    with torch._C.DisableTorchFunctionSubclass():
        return part.numel() if _is_asked_by_tulle() else round(together().numbers(part))


def _is_asked_by_tulle() -> bool:
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_name == "__torch_function__":
        frame = frame.f_back
    return str(frame.f_globals.get("__name__")).split(".")[0] == "tulle"
