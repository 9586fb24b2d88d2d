"""Multi-head and multi-query attention, and T5's relative positions."""

from __future__ import annotations

import math

import torch

from tulle.errors import ModelError
from tulle.named.attention import attention
from tulle.named.dims import Dim
from tulle.named.lookup import gather
from tulle.named.module import Module, param
from tulle.named.pointwise import range as positions_along
from tulle.named.reduction import softmax
from tulle.named.tensor import Tensor, elementwise

_FARTHEST = 128
"""Distances from here on share a bucket, as in T5."""


class Attention(Module):
    """Every position gathers what it needs from a memory, which may be its own sequence.

    Args:
        d_model: Dimension of what comes in and goes out.
        heads: How many gather at once.
        d_kv: Dimension of keys and values.
        is_multi_query: Whether all heads share one key and one value.
    """

    def __init__(self, d_model: Dim, heads: Dim, d_kv: Dim, *, is_multi_query: bool = False) -> None:
        super().__init__()
        self.d_model, self.heads, self.d_kv = d_model, heads, d_kv
        own = () if is_multi_query else (heads,)
        self.query = param(d_model, heads, d_kv)
        self.key, self.value = param(d_model, *own, d_kv), param(d_model, *own, d_kv)
        self.out = param(heads, d_kv, d_model, inputs=(heads, d_kv))

    def keys_values(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        """What a memory offers; computed once for all who look at it."""
        return memory.dot(self.key, self.d_model), memory.dot(self.value, self.d_model)

    def forward(
        self,
        x: Tensor,
        keys_values: tuple[Tensor, Tensor],
        memory: Dim,
        length: Dim | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        """From `d_model` to `d_model`.

        Args:
            x: The positions that look, or one position without a dimension of length.
            keys_values: What is looked at.
            memory: Its dimension.
            length: The positions' dimension, if there is one.
            bias: Added to the scores.
        """
        query = x.dot(self.query, self.d_model)
        key, value = keys_values
        if length is not None:
            mixed = attention(query, key, value, (length, memory, self.d_kv), bias=bias)
        else:
            scores = query.dot(key, self.d_kv) * self.d_kv.size**-0.5
            mixed = softmax(scores if bias is None else scores + bias, memory).dot(value, memory)
        return mixed.dot(self.out, (self.heads, self.d_kv))


class RelativeBias(Module):
    """A learnt bias for each head and each distance, far distances together.

    Args:
        buckets: How many distances are told apart.
        heads: The heads.
        is_causal: Whether nobody looks ahead: all buckets are for what came before.

    Raises:
        ModelError: If there are fewer than two buckets to a side.

    Source: Raffel et al., *Exploring the Limits of Transfer Learning* (T5, 2020), section 2.1.
    """

    def __init__(self, buckets: Dim, heads: Dim, *, is_causal: bool) -> None:
        super().__init__()
        least = 2 if is_causal else 4
        if buckets.size < least:
            raise ModelError(f"RelativeBias was given {buckets!r}, expected {least} or more: some near, some far")
        self.buckets, self.is_causal = buckets, is_causal
        self.table = param(buckets, heads, std=0.1)

    def forward(self, positions: Tensor, memory: Dim) -> Tensor:
        """The bias of positions, such as `tn.range(length)`, that look at a memory; minus infinity ahead if causal."""
        distance = elementwise(torch.sub, positions_along(memory), positions)
        bias = gather(self.table, distance.map(self._bucket), self.buckets)
        if not self.is_causal:
            return bias
        barred = torch.zeros((), dtype=bias.dtype, device=bias.device)
        return bias + distance.map(lambda local: torch.where(local > 0, float("-inf"), barred))

    def _bucket(self, distance: torch.Tensor) -> torch.Tensor:
        count = self.buckets.size if self.is_causal else self.buckets.size // 2
        ahead = 0 if self.is_causal else (distance > 0).long() * count
        far = (-distance).clamp(min=0) if self.is_causal else distance.abs()
        exact = count // 2
        # Half of the buckets are for single distances, the other half for ranges that grow by a factor.
        farthest = max(_FARTHEST, 2 * exact)
        growing = torch.log(far.clamp(min=1) / exact) / math.log(farthest / exact) * (count - exact)
        return ahead + torch.where(far < exact, far, (exact + growing.long()).clamp(max=count - 1))
