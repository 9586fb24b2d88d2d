"""`ShardGradient`: the gradient of a rank's part of a table, whose norm is that of the whole.

Without it `torch.nn.utils.clip_grad_norm_` would scale every rank's gradients by another factor, and a gradient scaler
would skip a step on one rank only. Nothing else about it differs from a plain tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tulle.comm import all_reduce
from tulle.mesh import Axis
from tulle.parts import meets_parts

FOREACH_NORM = vars(torch)["_foreach_norm"]
UNSCALE = vars(torch)["_amp_foreach_non_finite_check_and_unscale_"]
_LABEL = "gradient norm"


@meets_parts
class ShardGradient(torch.Tensor):
    """A gradient, dense or sparse, of which every rank of an axis has a part.

    Norms as gradient clipping takes them (`torch._foreach_norm`, `torch.linalg.vector_norm`), and the check for
    infinities of a gradient scaler, are over all ranks: every rank must take them. Other operations see a plain tensor.
    """

    axis: Axis

    @classmethod
    def of(cls, gradient: Tensor, axis: Axis) -> ShardGradient:
        """Turn a plain gradient into one; it stays the object that it is."""
        gradient.__class__ = cls  # as_subclass refuses sparse tensors
        assert isinstance(gradient, ShardGradient), "just made so"
        gradient.axis = axis
        return gradient

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Let all operations but norms see plain tensors."""
        if any(not issubclass(kind, ShardGradient) for kind in types):
            return NotImplemented  # a gradient that is still under way comes first
        keywords = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **keywords)
        if (order := order_of_norms(func, args, keywords)) is not None:
            if func is FOREACH_NORM:
                return _norms_over_ranks(args[0], result, order)
            return _norms_over_ranks([args[0]], [result], order)[0]
        if func is UNSCALE:
            shard = next(gradient for gradient in args[0] if isinstance(gradient, ShardGradient))
            all_reduce(args[1], shard.axis, label=_LABEL, op="max").wait()
        return result


def order_of_norms(func: object, args: Sequence[Any], keywords: Mapping[str, Any]) -> float | None:
    """The order, if a call takes norms of whole tensors (`_foreach_norm`, `vector_norm`); else None."""
    if func is not FOREACH_NORM and not (func is torch.linalg.vector_norm and len(args) + len(keywords) <= 2):
        return None
    return float(args[1] if len(args) > 1 else keywords.get("ord", 2))


def _norms_over_ranks(gradients: Sequence[Tensor], norms: list[Tensor], order: float) -> list[Tensor]:
    """Norms of which those of parts are replaced by those of the wholes; one all-reduce for all."""
    parts = [t for t, gradient in enumerate(gradients) if isinstance(gradient, ShardGradient)]
    shard = gradients[parts[0]]
    assert isinstance(shard, ShardGradient), "only these are listed"
    stacked = torch.stack([norms[t] for t in parts])
    if order == float("inf"):
        whole = all_reduce(stacked, shard.axis, label=_LABEL, op="max").wait()
    else:
        whole = all_reduce(stacked**order, shard.axis, label=_LABEL).wait() ** (1 / order)
    wholes = dict(zip(parts, whole.unbind(), strict=True))
    return [wholes.get(t, norm) for t, norm in enumerate(norms)]
