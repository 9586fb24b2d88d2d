"""`ordered`: numbers as integers of the same order, of which every backend finds the largest as torch does.

A backend's own largest, or smallest, of floating-point numbers is NaN or not by which rank has one.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor


def ordered(numbers: Tensor, op: Literal["max", "min"]) -> Tensor:
    """Floating-point numbers as integers, NaN beyond the infinity that an extremum goes to; integers as they are.

    The bits of numbers, as soon as those of negative ones are turned, are in the numbers' order.

    Example:
        >>> numbers_of(ordered(torch.tensor([3.0, math.nan]), "max").max(), torch.float32)
        tensor(nan)
    """
    if not numbers.is_floating_point():
        return numbers
    wide = numbers.to(_wide(numbers.dtype))
    wide = wide.masked_fill(wide.isnan(), math.nan if op == "max" else -math.nan)
    return _turned(wide.view(torch.int64 if wide.dtype == torch.float64 else torch.int32))


def numbers_of(integers: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers of a dtype that `ordered` made integers of."""
    return _turned(integers).view(_wide(dtype)).to(dtype) if dtype.is_floating_point else integers.to(dtype)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _turned(bits: Tensor) -> Tensor:
    return torch.where(bits < 0, bits ^ torch.iinfo(bits.dtype).max, bits)
