"""`number_of_whole`: one number of a whole tensor, from those of the parts that ranks have of it.

Sums, means and dot products are summed over ranks, norms are of the ranks' norms, the largest and whether any or all
are so is the same of the ranks', variance and deviation are about the mean of all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

Reduction = Literal["sum", "max", "min"]
_ORDERS = {"norm": "p", "linalg_vector_norm": "ord", "linalg_norm": "ord"}
"""By name of what takes norms, what it calls their order."""
_SUMS = {"sum", "nansum", "dot", "vdot"}
_LOSSES = {"mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"}
"""Names of what sums, or averages, over two tensors."""
_WITH_GRADIENT = {*_SUMS, *_LOSSES, "mean"}
"""Names of what gives a sum, or mean, of what it gives of all parts, and gradients by them."""


@dataclass(frozen=True, slots=True)
class Together:
    """How ranks make one number of all from those of their parts.

    Args:
        over: Given a rank's number, what all ranks' make by a reduction; a sum gives each rank's number its gradient.
            Every rank must call it.
        count: Numbers in the whole; None to count them.
    """

    over: Callable[[Tensor, Reduction], Tensor]
    count: int | None

    def numbers(self, part: Tensor) -> int | float:
        """So many has the whole. Every rank must call it."""
        if self.count is not None:
            return self.count
        return self.over(torch.tensor(float(part.numel()), dtype=torch.float64, device=part.device), "sum").item()


def number_of_whole(
    name: str, part: Tensor, args: Sequence[Any], keywords: Mapping[str, Any], result: Tensor, together: Together
) -> Tensor | None:
    """What a function gives of the whole, if it gave `result`, one number, of a part; None if that is not known.

    Sums, means and norms have gradients. Every rank must call it.
    """
    found = _number_of_whole(name, part, args, keywords, _wide(result), together)
    return found if found is None or found.dtype == torch.bool else found.to(result.dtype)


def _number_of_whole(
    name: str, part: Tensor, args: Sequence[Any], keywords: Mapping[str, Any], result: Tensor, together: Together
) -> Tensor | None:
    over = together.over
    if (order := order_of(name, part, args, keywords)) is not None:
        return norm_of_whole(result, order, together)
    if name in _SUMS or name == "count_nonzero" or (name in _LOSSES and keywords.get("reduction") == "sum"):
        return over(result, "sum")
    if name in ("max", "amax"):
        return over(result, "max")
    if name in ("any", "all"):
        return over(result.to(torch.float32), "max" if name == "any" else "min") > 0
    if name in ("min", "amin"):
        return over(result, "min")
    if name == "mean" or (name in _LOSSES and keywords.get("reduction", "mean") == "mean"):
        return over(result * part.numel() if part.numel() else _wide(part.sum()), "sum") / together.numbers(part)
    if name in ("std", "var"):
        variance = _variance(_wide(part), args, keywords, over, together.numbers(part))
        return variance.sqrt() if name == "std" else variance
    return None


def has_gradient_of_parts(name: str, part: Tensor, args: Sequence[Any], keywords: Mapping[str, Any]) -> bool:
    """Whether the number that a function gives of all is made, with gradients, of those that it gives of the parts.

    Example:
        >>> [has_gradient_of_parts(name, torch.ones(2), [torch.ones(2)], {}) for name in ("norm", "mean", "max")]
        [True, True, False]
    """
    order = order_of(name, part, args, keywords)
    return name in _WITH_GRADIENT if order is None else 0 < order < math.inf


def order_of(name: str, part: Tensor, args: Sequence[Any], keywords: Mapping[str, Any]) -> float | None:
    """The order, if a call that gives one number takes the norm of all numbers; else None.

    Example:
        >>> order_of("norm", torch.ones(2, 2), [torch.ones(2, 2)], {"p": 1}), order_of("sum", torch.ones(2), [], {})
        (1.0, None)
    """
    if name not in _ORDERS:
        return None
    order = keywords.get(_ORDERS[name], args[1] if len(args) > 1 else None)
    if name == "linalg_norm" and part.dim() > 1 and order not in (None, "fro"):
        return None  # of a matrix
    order = 2.0 if order in (None, "fro") else order
    return float(order) if not isinstance(order, str) and order >= 0 else None


def norm_of_whole(norm: Tensor, order: float, together: Together) -> Tensor:
    """The norm of the whole, from that of a part, or several such. Every rank must call it.

    Example:
        >>> twice = Together(lambda number, op: 2 * number if op == "sum" else number, count=None)
        >>> norm_of_whole(torch.tensor(3.0), 1.0, twice), norm_of_whole(torch.tensor(3.0), math.inf, twice)
        (tensor(6.), tensor(3.))
    """
    if math.isinf(order):
        return together.over(norm, "max")
    if not order:
        return together.over(norm, "sum")
    power = together.over(_wide(norm) ** order, "sum")
    is_zero = power == 0  # where the root has no gradient, and torch's norms have zero
    return (power.masked_fill(is_zero, 1.0) ** (1 / order)).masked_fill(is_zero, 0.0).to(norm.dtype)


def _wide(numbers: Tensor) -> Tensor:
    """Those of half precision in single, as torch sums them: a square, or a sum, may be too large for theirs."""
    return numbers.float() if numbers.dtype in (torch.float16, torch.bfloat16) else numbers


def _variance(
    part: Tensor, args: Sequence[Any], keywords: Mapping[str, Any], over: Callable[..., Tensor], count: float
) -> Tensor:
    """Of all numbers of the whole, so many, with the correction that a call of `std` or `var` asks for."""
    unbiased = keywords.get("unbiased", args[1] if len(args) > 1 and isinstance(args[1], bool) else True)
    correction = keywords.get("correction", unbiased)
    mean = over(part.sum(), "sum") / count
    squares = over((part - mean).abs().square().sum(), "sum")
    return squares / max(0, count - (1 if correction is None else correction))
