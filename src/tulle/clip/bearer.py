"""`Bearer`: the one gradient on each rank by which torch's own functions learn of the other ranks' gradients.

`torch.nn.utils.clip_grad_norm_` and `torch.amp.GradScaler` see this rank's gradients only. Of a model that is split
over ranks each would clip by another factor, or skip a step that others make. So one gradient of each optimizer gives

    its norm                   such that with this rank's others it makes up the norm of all ranks' gradients
    whether it is finite       whether all ranks' are
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from tulle.clip.spread import Spread, spread_of
from tulle.clip.total import norm_over_ranks
from tulle.comm import all_reduce
from tulle.tables import ShardGradient
from tulle.tables.gradient import FOREACH_NORM, UNSCALE, order_of_norms


@dataclass(frozen=True, slots=True, eq=False)
class Burden:
    """What a bearer speaks for.

    Args:
        spread: Over which axes the model is split.
        parameters: All that this rank has.
        takes_norms: Whether norms are its affair: that of one bearer on each rank.
    """

    spread: Spread
    parameters: Sequence[Tensor]
    takes_norms: bool

    def norm(self, order: float, bearer: Tensor) -> Tensor:
        """The norm that makes up that of all ranks' dense gradients with this rank's others."""
        mine = [
            (parameter, plain(parameter.grad))
            for parameter in self.parameters
            if parameter.grad is not None and parameter.grad.layout == torch.strided
        ]
        counted = [gradient for p, gradient in mine if (spread := spread_of(p)) is None or spread.counts]
        total = norm_over_ranks(counted, self.spread, order)
        if math.isinf(order):
            return total
        others = [g for _, g in mine if g.data_ptr() != bearer.data_ptr() or not g.numel()]
        rest = get_total_norm(others, order).to(total) ** order if others else total.new_zeros(())
        return (total**order - rest).clamp(min=0.0) ** (1 / order)


class Bearer(torch.Tensor):
    """A gradient that speaks for all; other operations see a plain tensor."""

    burden: Burden

    @classmethod
    def of(cls, gradient: Tensor, burden: Burden) -> Bearer:
        """Turn a plain gradient into one; it stays the object that it is."""
        gradient.__class__ = cls
        assert isinstance(gradient, Bearer), "just made so"
        gradient.burden = burden
        return gradient

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Let all operations but these see plain tensors. Every rank must take norms, and look for infinities."""
        keywords = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **keywords)
        if func is UNSCALE:
            _agree_on_infinities(args[0], args[1])
        elif func is Tensor._values:  # of a sparse one, which is what a scaler looks at
            return cls.of(result, args[0].burden)
        elif (order := order_of_norms(func, args, keywords)) is not None:
            if func is FOREACH_NORM:
                return [_norm(gradient, norm, order) for gradient, norm in zip(args[0], result, strict=True)]
            return _norm(args[0], result, order)
        return result


def plain(gradient: Tensor) -> Tensor:
    """The same numbers, in the same memory, as a tensor that speaks for itself."""
    return gradient.as_subclass(Tensor) if isinstance(gradient, Bearer) else gradient


def _norm(gradient: Tensor, norm: Tensor, order: float) -> Tensor:
    if not isinstance(gradient, Bearer) or not gradient.burden.takes_norms:
        return norm
    return gradient.burden.norm(order, gradient).to(norm)


def _agree_on_infinities(gradients: Sequence[Tensor], found: Tensor) -> None:
    bearer = next(gradient for gradient in gradients if isinstance(gradient, Bearer))
    shards = [gradient.axis for gradient in gradients if isinstance(gradient, ShardGradient)]
    for axis in (*shards[:1], *bearer.burden.spread.axes):
        all_reduce(found, axis, label="gradient norm", op="max").wait()
