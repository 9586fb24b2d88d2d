"""`pooled`: what bags take of rows that were fetched; the gradients of many are added up by runs of equal rows.

torch adds the gradient of each lookup to its row, one after the other. To sort the lookups by their rows, and to sum
what then lies side by side, takes half of that, or less; the sums are in the order of the lookups, as torch's are.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from tulle.rows import Merge

_MANY = 4096
"""Of fewer lookups torch's own way is as fast."""


def pooled(
    positions: Tensor,
    rows: Tensor,
    offsets: Tensor | None = None,
    *,
    mode: str = "mean",
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None,
) -> Tensor:
    """`F.embedding_bag(positions, rows)`."""
    if mode == "max" or per_sample_weights is not None or not _is_worth(positions, rows):
        return F.embedding_bag(
            positions,
            rows,
            offsets,
            mode=mode,
            per_sample_weights=per_sample_weights,
            include_last_offset=include_last_offset,
            padding_idx=padding_idx,
        )
    return cast("Tensor", _Pooled.apply(rows, positions, offsets, mode, include_last_offset, padding_idx))


def _is_worth(positions: Tensor, rows: Tensor) -> bool:
    """On a GPU the host would wait for how many rows are different."""
    is_trained = rows.requires_grad and torch.is_grad_enabled()
    return is_trained and positions.numel() >= _MANY and rows.device.type == "cpu"


class _Pooled(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        positions: Tensor,
        offsets: Tensor | None,
        mode: str,
        include_last_offset: bool,  # noqa: FBT001 - as torch calls it
        padding: int | None,
    ) -> Tensor:
        result = F.embedding_bag(
            positions, rows, offsets, mode=mode, include_last_offset=include_last_offset, padding_idx=padding
        )
        ctx.bag_of = _bag_of(positions, offsets, len(result))
        ctx.positions = positions.reshape(-1)[: len(ctx.bag_of)]  # a last offset may leave some out
        ctx.padding, ctx.count, ctx.is_mean = padding, len(rows), mode == "mean"
        ctx.set_materialize_grads(False)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        [gradient] = gradients
        if gradient is None:
            return (None,) * 6
        positions, bag_of = ctx.positions, ctx.bag_of
        if ctx.padding is not None:
            is_counted = positions != ctx.padding
            positions, bag_of = positions[is_counted], bag_of[is_counted]
        wide = gradient.float() if gradient.dtype in (torch.float16, torch.bfloat16) else gradient
        if ctx.is_mean:
            wide = wide / torch.bincount(bag_of, minlength=len(gradient)).clamp_(min=1).unsqueeze(1)
        merge = Merge.of(positions)
        summed = F.embedding_bag(bag_of[merge.order], wide.contiguous(), merge.starts, mode="sum").to(gradient.dtype)
        return _in_place(summed, merge.rows, ctx.count), *[None] * 5


def _bag_of(positions: Tensor, offsets: Tensor | None, bags: int) -> Tensor:
    """`[lookups]` which bag each is in."""
    if offsets is None:
        return torch.arange(bags).repeat_interleave(positions.shape[1])
    ends = torch.cat([offsets[1 : bags + 1].long(), offsets.new_full((1,), len(positions)).long()])[:bags]
    return torch.arange(bags).repeat_interleave(ends - offsets[:bags].long())


def _in_place(summed: Tensor, places: Tensor, count: int) -> Tensor:
    """`[count, width]`: sums at ascending places, and zeros elsewhere."""
    if len(summed) == count:
        return summed
    return summed.new_zeros(count, summed.shape[1]).index_copy_(0, places, summed)
