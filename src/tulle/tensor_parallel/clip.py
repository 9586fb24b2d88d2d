"""The norm of gradients of which each rank has parts."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from tulle.comm import all_reduce
from tulle.errors import GradientError
from tulle.mesh import Axis
from tulle.tables import ShardGradient
from tulle.tensor_parallel.placement import placements_of


@torch.no_grad()
def gradient_norm(model: nn.Module, norm_type: float = 2.0) -> Tensor:
    """The norm of all gradients of a model, of parts and of whole ones alike, the same on every rank.

    Every rank of the axes over which the model is split must call it.

    Args:
        model: Split or not.
        norm_type: Order of the norm; `inf` for the largest absolute value.

    Raises:
        GradientError: If the order is 0 or `-inf`, and ranks have parts of gradients.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(3, 1, bias=False)
        >>> model(torch.ones(1, 3)).sum().backward()
        >>> round(gradient_norm(model).item(), 3)
        1.732
    """
    parts: dict[int, tuple[Axis, list[Tensor]]] = {}
    whole: list[Tensor] = []
    seen: set[int] = set()
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.grad is None or id(parameter) in seen:
                continue
            seen.add(id(parameter))
            placement = placements_of(module).get(name)
            if placement is None or isinstance(parameter.grad, ShardGradient):  # whose norm is of the whole
                whole.append(parameter.grad)
            else:
                parts.setdefault(id(placement.axis.group), (placement.axis, []))[1].append(parameter.grad)
    if norm_type in (0, -math.inf):  # no sums of powers, nor largest ones
        if parts:
            raise GradientError(f"no norm of order {norm_type} is taken over ranks: take one of order 2, say, or inf")
        return get_total_norm(whole, norm_type)
    powers = [_power(whole, norm_type)]
    for axis, gradients in parts.values():
        power = _power(gradients, norm_type).to(axis.device)
        powers.append(all_reduce(power, axis, label="gradient norm", op="max" if _is_max(norm_type) else "sum").wait())
    together = torch.stack([power.to(powers[-1]) for power in powers])
    return together.max() if _is_max(norm_type) else together.sum() ** (1 / norm_type)


@torch.no_grad()
def clip_grad_norm_(model: nn.Module, max_norm: float, norm_type: float = 2.0) -> Tensor:
    """As `torch.nn.utils.clip_grad_norm_`, of a model that is split. Every rank of its axes must call it.

    Args:
        model: Split or not.
        max_norm: The largest norm allowed.
        norm_type: Order of the norm.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(3, 1, bias=False)
        >>> model(torch.ones(1, 3)).sum().backward()
        >>> norm = clip_grad_norm_(model, 1.0)
        >>> round(model.weight.grad.norm().item(), 3)
        1.0
    """
    norm = gradient_norm(model, norm_type)
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(factor.to(parameter.grad))
    return norm


def _power(gradients: Sequence[Tensor], norm_type: float) -> Tensor:
    if not gradients:
        return torch.zeros(())
    norms = torch.stack([gradient.norm(norm_type) for gradient in gradients])
    norms = norms.to(torch.promote_types(norms.dtype, torch.float32))  # of half precision squares may be too large
    return norms.max() if _is_max(norm_type) else (norms**norm_type).sum()


def _is_max(norm_type: float) -> bool:
    return math.isinf(norm_type)
