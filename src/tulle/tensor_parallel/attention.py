"""`SplitAttention`: `nn.MultiheadAttention` whose heads are split over an axis.

Source: Shoeybi et al., *Megatron-LM* (2019), section 3: the projections of queries, keys and values are column layers,
the output's is a row layer, and each rank attends with its own heads.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from tulle.errors import ModelError
from tulle.tensor_parallel.dropout import OwnRandomness
from tulle.tensor_parallel.region import Region


class SplitAttention(nn.MultiheadAttention):
    """`nn.MultiheadAttention` that holds some of its heads; arguments and results are those of the whole."""

    queries: Region
    """What queries, and keys that are the same tensor, enter."""
    whole: Region
    """What other keys and values, and masks, which may be trained, enter: they are whole on every rank in any case."""
    heads: slice
    """This rank's heads."""
    randomness: OwnRandomness

    def forward(  # noqa: PLR0913 - torch's signature
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,  # noqa: FBT001 - torch's signature
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,  # noqa: FBT001
        is_causal: bool = False,  # noqa: FBT001
    ) -> tuple[Tensor, Tensor | None]:
        """As torch's; with `need_weights`, weights that are not averaged over heads are those of this rank's heads."""
        if is_causal and attn_mask is None:
            raise ModelError(
                f"{self.queries.label} was called with is_causal=True and no attn_mask, but it is a hint about a mask: "
                "give one"
            )
        is_single = query.dim() == 2
        query, key, value = self._entered(query, key, value)
        if is_single:
            query, key, value = query.unsqueeze(1), key.unsqueeze(1), value.unsqueeze(1)
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        elif self.batch_first:
            query, key, value = query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1)
        bias = self._bias(attn_mask, key_padding_mask, query, key.shape[0])
        heads, weights = self._attend(self._projected(query, key, value), bias, need_weights=need_weights)
        output = self.out_proj(heads.permute(2, 0, 1, 3).flatten(2))
        output = output.squeeze(1) if is_single else output.transpose(0, 1) if self.batch_first else output
        if weights is not None and average_attn_weights:
            weights = self.whole.leave(weights.sum(1)) / (self.num_heads * self.whole.axis.size)
        return output, weights.squeeze(0) if weights is not None and is_single else weights

    def _entered(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What is one tensor enters once: the projections' gradients are summed before they travel."""
        entered = {id(query): self.queries.enter(query)}
        for other in (key, value):
            if id(other) not in entered:
                entered[id(other)] = self.whole.enter(other)
        return entered[id(query)], entered[id(key)], entered[id(value)]

    def _projected(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """Queries, keys and values as `[samples, this rank's heads, length, head_dim]`."""
        if self.in_proj_weight is not None:
            weights = self.in_proj_weight.chunk(3)
        else:
            weights = self.q_proj_weight, self.k_proj_weight, self.v_proj_weight
        biases = (None, None, None) if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        return [
            functional.linear(one, weight, bias).unflatten(-1, (self.num_heads, self.head_dim)).permute(1, 2, 0, 3)
            for one, weight, bias in zip((query, key, value), weights, biases, strict=True)
        ]

    def _bias(self, mask: Tensor | None, padding: Tensor | None, query: Tensor, keys: int) -> Tensor | None:
        """Both masks as what is added to the scores, `[1 or samples, 1 or this rank's heads, length or 1, keys]`."""
        bias = None
        if mask is not None:
            bias = _additive(self.whole.enter(mask), query)
            # Of three dimensions, it has one mask for each sample and head of the whole.
            bias = (
                bias.unflatten(0, (-1, self.num_heads * self.queries.axis.size))[:, self.heads]
                if bias.dim() == 3
                else bias[None, None]
            )
        if padding is not None:
            padded = _additive(self.whole.enter(padding), query).view(-1, 1, 1, keys)
            bias = padded if bias is None else bias + padded
        return bias

    def _attend(
        self, projected: list[Tensor], bias: Tensor | None, *, need_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        query, key, value = projected
        dropped = self.dropout if self.training else 0.0
        if not need_weights:
            with self.randomness.stretch(dropped):
                return functional.scaled_dot_product_attention(query, key, value, bias, dropped), None
        scores = query @ key.mT / math.sqrt(self.head_dim)
        weights = torch.softmax(scores if bias is None else scores + bias, -1)
        with self.randomness.stretch(dropped):
            weights = functional.dropout(weights, dropped)
        return weights @ value, weights


def _additive(mask: Tensor, like: Tensor) -> Tensor:
    if mask.dtype == torch.bool:
        return torch.zeros(mask.shape, dtype=like.dtype, device=like.device).masked_fill(mask, -math.inf)
    return mask.to(like.dtype)
