"""`clip_grad_norm_`: gradient clipping by global norm that also knows sparse gradients and other ranks' parts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from tulle.clip.proxy import plain
from tulle.clip.total import is_summed, norm_over_ranks
from tulle.engine import average_by_hand, engines_of
from tulle.errors import GradientError
from tulle.rows import RowSparse
from tulle.spread import Spread, is_counted, spread_of_all
from tulle.tables import ShardGradient

_EXPECTED = "expected a model, a parameter, or several: model, or model.parameters()"


@torch.no_grad()
def clip_grad_norm_(
    parameters: nn.Module | Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale all gradients together so that their norm is at most `max_norm`, in place; return the norm before.

    Does what `torch.nn.utils.clip_grad_norm_` does, and knows two things more: sparse gradients, and gradients of which
    other ranks have parts. Call it after `loss.backward()`, on every rank. Replicas have the same gradients by then,
    and so the same norm, without a message. Of a model that is split over axis `pipe` or `model`, or has split tables,
    a number travels. Gradients that the loop has set by hand are averaged over the ranks first.

    Args:
        parameters: A model, a parameter, or several.
        max_norm: The largest norm allowed.
        norm_type: Order of the norm; `inf` for the largest absolute value.
        error_if_nonfinite: Whether to raise, rather than scale, when the norm is NaN or infinite.

    Raises:
        GradientError: If something else is given than parameters, or numbers; if a parameter is part of a model of
            `tulle.named`, which clips in a way of its own; or, with `error_if_nonfinite`, if the norm is not finite,
            naming the first parameter that is to blame.

    Example:
        >>> import torch, tulle
        >>> table = torch.nn.Embedding(4, 2, sparse=True)
        >>> table(torch.tensor([1, 1])).sum().backward()
        >>> round(tulle.clip_grad_norm_(table, max_norm=1.0).item(), 4)
        2.8284
    """
    named = list(_named(parameters))
    _check_clippers(named)
    order = _checked_order(max_norm, norm_type)
    asked = [p for _, p in named]
    average_by_hand(asked, [engine for engine in engines_of(asked) if engine.home.size > 1])
    # torch has no infinity norm of nothing. Of a part of a table every rank takes the norm, be it empty here.
    found = [
        (p, part)
        for p in asked
        if (gradient := p.grad) is not None and ((part := _values(gradient)).numel() or isinstance(part, ShardGradient))
    ]
    spread = spread_of_all(asked)
    if spread is None and not found:
        return torch.tensor(0.0)
    total = _norm(found, asked, spread, order)
    if error_if_nonfinite and not torch.isfinite(total):
        infinite = {id(p) for p, part in found if not part.isfinite().all()}
        to_blame = next((_said(name) for name, p in named if id(p) in infinite), "all")
        raise GradientError(
            f"the gradient norm is {total.item()}, expected a finite one; the first parameter to blame is {to_blame}: "
            "call tulle.distribute with check_finite=True to learn on which rank it began"
        )
    # As in torch: a multiplication by 1 costs less than asking a GPU whether clipping is needed.
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    scale = vars(torch)["_foreach_mul_"]  # documented, but not exported
    parts = [part for _, part in found]
    devices = {part.device for part in parts}
    for device in devices:
        there = parts if len(devices) == 1 else [part for part in parts if part.device == device]
        scale(there, factor.to(device))
    return total


def _norm(
    found: Sequence[tuple[Tensor, Tensor]], asked: Sequence[Tensor], spread: Spread | None, norm_type: float
) -> Tensor:
    """The norm of all gradients. Every rank of the axes of the spread must call it.

    Args:
        found: Each parameter that has a gradient here, and that.
        asked: All parameters.
        spread: Over which axes they lie; None if they do not.
        norm_type: As in torch.
    """
    parts = [part for _, part in found]
    if spread is None:
        return get_total_norm(parts, norm_type)
    counted = [part for p, part in found if is_counted(p, spread)]
    alone = [part for part in parts if isinstance(part, ShardGradient) and not is_summed(part, spread)]
    uncounted = [part for part in alone if all(part is not c for c in counted)]
    if uncounted:  # ranks of axis `data` take these together
        get_total_norm(uncounted, norm_type)
    # Of a rank that has none of these gradients, by its parameters, which are on `meta` then.
    dtype = max((one.dtype.to_real() for one in parts or asked), key=lambda dtype: dtype.itemsize)
    return norm_over_ranks(counted, spread, norm_type).to(dtype)


def _named(parameters: nn.Module | Tensor | Iterable[Tensor]) -> Iterable[tuple[str | int, Tensor]]:
    """Parameters with their names in a model, or else their numbers."""
    if isinstance(parameters, nn.Module):
        return parameters.named_parameters()
    several = [parameters] if isinstance(parameters, Tensor) else parameters
    if not isinstance(several, Iterable):
        raise GradientError(f"clip_grad_norm_ was given a {type(several).__name__}, {_EXPECTED}")
    return enumerate(several)


def _said(name: str | int) -> str:
    return f"number {name}" if isinstance(name, int) else name


def _check_clippers(named: Iterable[tuple[str | int, Tensor]]) -> None:
    for name, parameter in named:
        if not isinstance(parameter, Tensor):
            raise GradientError(
                f"clip_grad_norm_ was given a {type(parameter).__name__} among the parameters, {_EXPECTED}"
            )
        clipper = getattr(parameter, "clipped_with", None)
        if isinstance(clipper, str):
            raise GradientError(
                f"of the parameter {_said(name)!r} this rank has a part; only {clipper} knows how it is laid out: call "
                "that"
            )


def _checked_order(max_norm: object, norm_type: Any) -> float:
    """The order of the norm, if it and the largest norm can be."""
    if not isinstance(max_norm, Real | Tensor):
        raise GradientError(f"clip_grad_norm_ was given max_norm={max_norm!r}, expected a number")
    try:
        return float(norm_type)
    except (TypeError, ValueError) as error:
        raise GradientError(
            f"clip_grad_norm_ was given norm_type={norm_type!r}, expected the order of a norm: 2, or 'inf'"
        ) from error


def _values(gradient: Tensor) -> Tensor:
    """The numbers of a gradient, each row of a sparse one once; scaling them in place scales the gradient."""
    if gradient.layout == torch.strided:
        return gradient if type(gradient) is Tensor else plain(gradient)
    if not gradient.is_coalesced():
        with torch._C.DisableTorchFunctionSubclass():  # of a part, what this rank has
            gradient.copy_(RowSparse.from_tensor(gradient).coalesce().to_sparse_coo())
    values = plain(gradient._values())
    if isinstance(gradient, ShardGradient):
        return ShardGradient.of(values if values.numel() else values.new_zeros(1), gradient.axes)
    return values
