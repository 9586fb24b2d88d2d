"""The norm of gradients of which each rank has some."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from tulle.comm import all_reduce
from tulle.errors import GradientError
from tulle.spread import Spread
from tulle.tables import ShardGradient

_WITH_DOUBLES = ("cpu", "cuda")


def norm_over_ranks(counted: Sequence[Tensor], spread: Spread, norm_type: float) -> Tensor:
    """The norm of all ranks' gradients. Every rank of the axes must call it.

    Args:
        counted: This rank's gradients that are to be counted; each gradient is on one rank only.
        spread: Says over which axes.
        norm_type: Order of the norm.

    Returns:
        In the precision in which it was summed, since a rank that counts nothing knows no other: float64, if there is
        one on the device.

    Raises:
        GradientError: If there is no norm of that order, or none that is put together from those of parts here.
    """
    if norm_type in (0, -math.inf):
        raise GradientError(f"no norm of order {norm_type} is taken over ranks: clip by one of order 2, say, or inf")
    is_max = math.isinf(norm_type)
    device = spread.axes[0].device
    power = torch.zeros((), device=device, dtype=torch.float64 if device.type in _WITH_DOUBLES else torch.float32)
    if counted:
        norm = get_total_norm([_own(gradient, spread) for gradient in counted], norm_type).to(power)
        power = norm if is_max else norm**norm_type
    for axis in spread.axes:
        power = all_reduce(power, axis, label="gradient norm", op="max" if is_max else "sum").wait()
    return power if is_max else power ** (1 / norm_type)


def is_summed(gradient: ShardGradient, spread: Spread) -> bool:
    """Whether the axes over which a gradient is shared out are among those over which norms are summed anyway."""
    return {axis.ranks for axis in gradient.axes} <= {axis.ranks for axis in spread.axes}


def _own(gradient: Tensor, spread: Spread) -> Tensor:
    """A gradient as a plain tensor, if it would answer for an axis over which norms are summed anyway."""
    is_part = isinstance(gradient, ShardGradient) and is_summed(gradient, spread)
    return gradient.as_subclass(Tensor) if is_part else gradient
