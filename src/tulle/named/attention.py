"""Attention: the fused kernel of torch on local parts where the layout allows it, else softmax between two products."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from tulle.errors import ModelError
from tulle.named.dims import Dim, Dims, united
from tulle.named.placed import aligned, check_named, label_of, shared_scope
from tulle.named.pointwise import causal_bias, dropout
from tulle.named.reduction import softmax, softmax_or_zeros
from tulle.named.tensor import Tensor, einsum


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    over: tuple[Dim, Dim, Dim],
    *,
    bias: Tensor | None = None,
    is_causal: bool = False,
    dropout_share: float = 0.0,
) -> Tensor:
    """Each query gathers values by how well their keys fit: softmax over memory of query times key by sqrt(d_kv).

    Args:
        query: Has length and d_kv; its other dimensions, such as batch and heads, are walked through together.
        key: Has memory and d_kv; it may lack heads, as in multi-query attention.
        value: Has memory and d_kv.
        over: Length, memory and d_kv.
        bias: Added before the softmax: minus infinity where nothing is to be looked at.
        is_causal: Whether positions look at none that come after them.
        dropout_share: Share of the weights that are dropped.

    Returns:
        The query's dimensions and those that only others have, then length and d_kv.

    Raises:
        ModelError: If one of the three lacks a dimension of `over` that it must have, or has one that it must not.
            Or if the bias is of booleans or integers.

    Source: Vaswani et al., *Attention Is All You Need* (2017), section 3.2; Shazeer, *Fast Transformer Decoding: One
    Write-Head is All You Need* (2019).
    """
    length, memory, d_kv = over
    inputs = [query, key, value, *([] if bias is None else [_added(bias, query)])]
    scope = shared_scope(inputs, "attention")
    for what, one, seen, other in (
        ("query", query, length, memory),
        ("key", key, memory, length),
        ("value", value, memory, length),
    ):
        one.place(seen, f"attention's {what}")
        one.place(d_kv, f"attention's {what}")
        if other in one.dims:
            raise ModelError(f"attention's {what} {one!r} has {other!r}: rename the memory's length before its product")
    walked = tuple(dim for dim in united(*[one.dims for one in inputs]) if dim not in over)
    if not dropout_share and scope.is_whole(*over):
        return _fused(inputs, walked, over, is_causal=is_causal)
    scores = query.dot(key, d_kv) * d_kv.size**-0.5
    scores = scores if bias is None else scores + inputs[3]
    if is_causal:
        scores = scores + causal_bias(length, memory, dtype=query.dtype)
    weights = softmax(scores, memory) if bias is None else softmax_or_zeros(scores, memory)
    return einsum(dropout(weights, dropout_share), value, out=(*walked, length, d_kv))


def _added(bias: Tensor, query: Tensor) -> Tensor:
    check_named(bias, "attention")
    if not bias.dtype.is_floating_point:
        raise ModelError(
            f"attention was given {bias!r} as its bias, which is added: make a mask one with tn.where(mask, 0.0, -inf)"
        )
    return bias.to(query.dtype)


def _fused(inputs: Sequence[Tensor], walked: Dims, over: tuple[Dim, Dim, Dim], *, is_causal: bool) -> Tensor:
    length, memory, d_kv = over
    scope = inputs[0].scope
    dims = united(*[one.dims for one in inputs])
    split = scope.axes(dims, "attention over")
    label = label_of("attention", dims)
    orders = [(*walked, length, d_kv), (*walked, memory, d_kv), (*walked, memory, d_kv), (*walked, length, memory)]
    sizes = [scope.local_size(dim) for dim in walked]
    parts: list[torch.Tensor] = []
    for one, order in zip(inputs, orders, strict=False):
        axes = tuple(sorted(axis for axis in split if split[axis] not in one.dims))
        part = aligned(one.entered(axes, label), one.dims, order)
        part = part if part.dim() > 1 else part.view(1, -1)  # a bias of the memory alone
        parts.append(part.expand(*sizes, *part.shape[-2:]).flatten(0, max(0, len(sizes) - 2)))
    mask = parts[3] if len(parts) > 3 else None
    if mask is not None and is_causal:
        mask = mask + causal_bias(length, memory, dtype=inputs[0].dtype).local
    mixed = F.scaled_dot_product_attention(*parts[:3], attn_mask=mask, is_causal=is_causal and mask is None)
    return Tensor(mixed.view(*sizes, length.size, d_kv.size), (*walked, length, d_kv))
