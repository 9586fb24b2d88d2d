"""`Adafactor` and gradient clipping on this rank's parts; torch's own AdamW works on them as it is.

An optimizer that treats each number by itself needs to know nothing of layouts. These two take means over dimensions
and over all parameters: they do so by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from tulle.errors import ModelError
from tulle.named.dims import Dim, Dims
from tulle.named.module import check_initialized, named_parameters
from tulle.named.placed import Axes
from tulle.named.reduction import mean
from tulle.named.scope import Scope, current, entered
from tulle.named.tensor import Tensor


class Adafactor(torch.optim.Optimizer):
    """Adam without a first moment, whose second moment of a matrix is kept as one row and one column.

    The two largest dimensions of a parameter are the matrix; parameters of one dimension keep a whole second moment.

    Args:
        model: Whose named and plain parameters to train.
        lr: The learning rate; default `min(0.01, 1 / sqrt(step))`.
        decay: The second moment forgets with the rate `1 - step ** -decay`.
        clip: Updates with a larger root mean square are scaled down to it.
        scales_by_parameter: Whether steps are in proportion to the parameter's root mean square.

    Raises:
        ModelError: If a number is out of its range, or parameters are given instead of their model.

    Source: Shazeer and Stern, *Adafactor* (ICML 2018), algorithms 4 and 5.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        lr: float | None = None,
        decay: float = 0.8,
        clip: float = 1.0,
        scales_by_parameter: bool = True,
    ) -> None:
        for name, value in (("lr", 1.0 if lr is None else lr), ("decay", decay), ("clip", clip)):
            if not value > 0:
                raise ModelError(f"Adafactor was given {name}={value!r}, expected a positive number")
        defaults = {"lr": lr, "decay": decay, "clip": clip, "scales_by_parameter": scales_by_parameter}
        check_initialized(model)
        self.dims = dict(dimensions(model))
        """Dimensions and scope of each parameter."""
        super().__init__(list(self.dims), defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update all parameters that have a gradient. Every rank must call it."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    dims, scope = self.dims[parameter]
                    with entered(scope):
                        self._update(parameter, dims, group)
        return loss

    def _update(self, parameter: nn.Parameter, dims: Dims, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        state["step"] = step = state.get("step", 0) + 1
        assert parameter.grad is not None, "only parameters with a gradient are updated"
        gradient = Tensor(parameter.grad, dims)
        forget = 1 - step ** -group["decay"]
        squares = gradient * gradient + 1e-30
        matrix = largest_two(dims)
        if matrix is None:
            update = gradient * _averaged(state, "square", squares, forget).map(torch.rsqrt)
        else:
            longer, shorter = matrix
            rows = _averaged(state, "row", mean(squares, shorter), forget)
            columns = _averaged(state, "column", mean(squares, longer), forget)
            update = gradient * (rows / mean(rows, longer)).map(torch.rsqrt) * columns.map(torch.rsqrt)
        size = max(1.0, _root_mean_square(update) / group["clip"])
        rate = group["lr"] if group["lr"] is not None else min(1e-2, step**-0.5)
        if group["scales_by_parameter"]:
            rate *= max(1e-3, _root_mean_square(Tensor(parameter, dims)))
        parameter.sub_(update.local, alpha=rate / size)


def largest_two(dims: Dims) -> tuple[Dim, Dim] | None:
    """The two largest dimensions, the largest first; None if there are not two."""
    ordered = sorted(dims, key=lambda dim: -dim.size)
    return (ordered[0], ordered[1]) if len(ordered) > 1 else None


def dimensions(model: nn.Module) -> Iterator[tuple[nn.Parameter, tuple[Dims, Scope]]]:
    """This rank's part of each parameter with its dimensions; those of plain modules are whole, their names made up."""
    seen: set[int] = set()
    for _, named in named_parameters(model):
        seen.add(id(named.parameter))
        yield named.parameter, (named.dims, named.scope)
    for parameter in model.parameters():
        if id(parameter) not in seen:
            made_up = tuple(Dim(f"dimension {place}", size) for place, size in enumerate(parameter.shape))
            yield parameter, (made_up, current())


@torch.no_grad()
def clip_grad_norm(model: nn.Module, max_norm: float) -> torch.Tensor:
    """Scale all gradients together so that their norm is at most `max_norm`, in place; return the norm before.

    Every rank must call it, after `backward`. One small all-reduce for each set of axes that splits parameters.

    Raises:
        ModelError: If `max_norm` is negative, or parameters are given instead of their model.

    Example:
        >>> from tulle import named as tn
        >>> d, = tn.dims(d=4)
        >>> model = tn.Module()
        >>> model.weight = tn.ones(d)
        >>> _ = model.init()
        >>> tn.sum(model.weight * 3).backward()
        >>> tn.clip_grad_norm(model, max_norm=1.0).item()
        6.0
    """
    if not max_norm >= 0:
        raise ModelError(f"clip_grad_norm was given max_norm={max_norm!r}, expected 0 or more")
    sums: dict[tuple[Scope, Axes], list[torch.Tensor]] = {}
    gradients: list[torch.Tensor] = []
    for parameter, (dims, scope) in dimensions(model):
        if parameter.grad is not None:
            gradients.append(parameter.grad)
            axes = tuple(sorted(scope.axes(dims, "the gradient of")))
            wide = torch.promote_types(parameter.grad.dtype, torch.float32)  # half precision does not hold squares
            squares = torch.linalg.vector_norm(parameter.grad, dtype=wide).square()
            sums.setdefault((scope, axes), []).append(squares)
    totals: list[torch.Tensor] = []
    for (scope, axes), squares in sums.items():
        total = torch.stack(squares).sum()
        totals.append(scope.wire.leave(total, axes, "named gradient norm") if axes else total)
    norm = torch.stack(totals).sum().sqrt() if totals else torch.zeros(())
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for gradient in gradients:
        gradient.mul_(scale)
    return norm


def _averaged(state: dict[str, Any], name: str, new: Tensor, forget: float) -> Tensor:
    """A moving average that the optimizer keeps."""
    local = new.local
    kept = state.setdefault(name, torch.zeros_like(local))
    kept.mul_(forget).add_(local, alpha=1 - forget)
    return new.with_part(kept)


def _root_mean_square(tensor: Tensor) -> float:
    return math.sqrt(mean(tensor * tensor).item())
