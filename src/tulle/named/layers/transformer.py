"""Stacks of Transformer layers, the language model, and the encoder-decoder, in named dimensions.

Source: Vaswani et al., *Attention Is All You Need* (2017), with T5's norms in front and relative positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

from torch import nn

from tulle.named.dims import Dim
from tulle.named.layers.attention import Attention, RelativeBias
from tulle.named.layers.linear import GLU, Norm
from tulle.named.lookup import gather
from tulle.named.loss import cross_entropy
from tulle.named.module import Module, param
from tulle.named.pointwise import dropout
from tulle.named.pointwise import range as positions_along
from tulle.named.tensor import Tensor

KeysValues = tuple[Tensor, Tensor]


class Source(NamedTuple):
    """Another sequence, as one decoder layer looks at it.

    Args:
        keys_values: What it offers.
        memory: Its positions.
        mask: A bias, very small where it is padding.
    """

    keys_values: KeysValues
    memory: Dim
    mask: Tensor


@dataclass(frozen=True, slots=True)
class Widths:
    """The dimensions of a Transformer.

    Args:
        d_model: Of what goes from layer to layer.
        heads: Attention heads.
        d_kv: Of a head's keys and values.
        d_ff: Inside the feed-forward layers.
        vocab: Words.
        buckets: Distances that attention tells apart.
        dropout: Share of values that are dropped where layers are added.
        is_multi_query: Whether all heads share keys and values.
    """

    d_model: Dim
    heads: Dim
    d_kv: Dim
    d_ff: Dim
    vocab: Dim
    buckets: Dim = Dim("buckets", 32)  # noqa: RUF009 - a plain value
    dropout: float = 0.0
    is_multi_query: bool = False


class Block(Module):
    """Attention within a sequence, attention to another if there is one, and a feed-forward layer; each is added."""

    def __init__(self, widths: Widths, *, has_source: bool) -> None:
        super().__init__()
        self.widths, d = widths, widths.d_model
        own = (d, widths.heads, widths.d_kv)
        self.norm, self.attention = Norm(d), Attention(*own, is_multi_query=widths.is_multi_query)
        if has_source:
            self.source_norm = Norm(d)
            self.source_attention = Attention(*own, is_multi_query=widths.is_multi_query)
        self.feed_norm, self.feed_forward = Norm(d), GLU(d, widths.d_ff)

    def forward(self, x: Tensor, length: Dim, memory: Dim, bias: Tensor, source: Source | None = None) -> Tensor:
        """All positions at once. `memory` is `length` under another name."""
        y = self.norm(x)
        own = self.attention.keys_values(y.rename(**{length.name: memory}))
        x = x + self._dropped(self.attention(y, own, memory, length, bias))
        if source is not None:
            x = x + self._dropped(self._look(x, source, length))
        return x + self._dropped(self.feed_forward(self.feed_norm(x)))

    def step(
        self,
        x: Tensor,
        past: KeysValues,
        memory: Dim,
        bias: Tensor,
        source: Source | None = None,
    ) -> Tensor:
        """One position, which looks at the keys and values of those so far, its own among them."""
        x = x + self.attention(self.norm(x), past, memory, None, bias)
        if source is not None:
            x = x + self._look(x, source, None)
        return x + self.feed_forward(self.feed_norm(x))

    def _look(self, x: Tensor, source: Source, length: Dim | None) -> Tensor:
        return self.source_attention(self.source_norm(x), source.keys_values, source.memory, length, source.mask)

    def _dropped(self, x: Tensor) -> Tensor:
        return dropout(x, self.widths.dropout) if self.training else x


class Stack(Module):
    """Layers one upon the other, one bias for all, and a norm at the end.

    Args:
        widths: Dimensions.
        layers: How many.
        length: Positions.
        memory: Positions that are looked at, as many.
        is_causal: Whether nobody looks ahead.
        has_source: Whether there is another sequence to look at.
    """

    def __init__(
        self, widths: Widths, layers: int, length: Dim, memory: Dim, *, is_causal: bool, has_source: bool = False
    ) -> None:
        super().__init__()
        self.length, self.memory = length, memory
        self.bias = RelativeBias(widths.buckets, widths.heads, is_causal=is_causal)
        self.blocks = nn.ModuleList(Block(widths, has_source=has_source) for _ in range(layers))
        self.norm = Norm(widths.d_model)

    def forward(self, x: Tensor, mask: Tensor | None = None, sources: Sequence[Source] = ()) -> Tensor:
        """All positions.

        Args:
            x: Has `length`.
            mask: Minus infinity where memory is padding.
            sources: Another sequence, as each layer looks at it.
        """
        bias = self.bias(positions_along(self.length), self.memory)
        bias = bias if mask is None else bias + mask
        for place, block in enumerate(self.blocks):
            x = block(x, self.length, self.memory, bias, sources[place] if sources else None)
        return self.norm(x)


class LanguageModel(Module):
    """Says of each position how probable the words after it are; the table of words is also that of the logits.

    Example:
        >>> import torch
        >>> from tulle import named as tn
        >>> batch, length, memory = tn.dims(batch=2, length=4, memory_length=4)
        >>> widths = Widths(*tn.dims(d_model=8, heads=2, d_kv=4, d_ff=16, vocab=10))
        >>> model = LanguageModel(widths, 1, length, memory).init(seed=0)
        >>> ids = tn.from_torch(torch.zeros(2, 4, dtype=torch.int64), (batch, length))
        >>> model(ids, ids)
        Tensor(batch=2, length=4; float32)
    """

    def __init__(self, widths: Widths, layers: int, length: Dim, memory: Dim) -> None:
        super().__init__()
        self.widths = widths
        self.table = param(widths.vocab, widths.d_model, inputs=widths.d_model)
        self.decoder = Stack(widths, layers, length, memory, is_causal=True)

    def logits(self, ids: Tensor) -> Tensor:
        """For each position and word."""
        x = gather(self.table, ids, self.widths.vocab) * self.widths.d_model.size**0.5
        return self.decoder(x).dot(self.table, self.widths.d_model)

    def forward(self, ids: Tensor, targets: Tensor, *, label_smoothing: float = 0.0) -> Tensor:
        """The loss of each position."""
        return cross_entropy(self.logits(ids), targets, self.widths.vocab, label_smoothing=label_smoothing)


class EncoderDecoder(Module):
    """Reads one sequence and writes another; one table of words for both and for the logits.

    Args:
        widths: Dimensions of both sides.
        layers: How many, of the encoder and of the decoder.
        source: Positions of what is read, and the same as memory.
        target: Positions of what is written, and the same as memory.
        pad: The word that stands for nothing.
    """

    def __init__(
        self,
        widths: Widths,
        layers: tuple[int, int],
        source: tuple[Dim, Dim],
        target: tuple[Dim, Dim],
        *,
        pad: int = 0,
    ) -> None:
        super().__init__()
        self.widths, self.source, self.target, self.pad = widths, source, target, pad
        self.table = param(widths.vocab, widths.d_model, inputs=widths.d_model)
        self.encoder = Stack(widths, layers[0], *source, is_causal=False)
        self.decoder = Stack(widths, layers[1], *target, is_causal=True, has_source=True)

    def encode(self, sources: Tensor) -> list[Source]:
        """What was read, as each decoder layer looks at it."""
        length, memory = self.source
        mask = self.padding(sources.rename(**{length.name: memory}))
        encoded = self.encoder(self.embed(sources), mask).rename(**{length.name: memory})
        layers = [cast("Block", block) for block in self.decoder.blocks]
        return [Source(block.source_attention.keys_values(encoded), memory, mask) for block in layers]

    def embed(self, ids: Tensor) -> Tensor:
        """Words as `d_model` numbers."""
        return gather(self.table, ids, self.widths.vocab) * self.widths.d_model.size**0.5

    def padding(self, ids: Tensor) -> Tensor:
        """Almost minus infinity where a word stands for nothing, so that a softmax over nothing but these is no NaN."""
        return ids.map(lambda local: (local == self.pad) * -1e9).to(self.table.dtype)

    def logits(self, sources: Tensor, ids: Tensor) -> Tensor:
        """For each position of what is written and each word."""
        x = self.decoder(self.embed(ids), None, self.encode(sources))
        return x.dot(self.table, self.widths.d_model)

    def forward(self, sources: Tensor, ids: Tensor, targets: Tensor, *, label_smoothing: float = 0.0) -> Tensor:
        """The loss of each position, 0 where the target stands for nothing."""
        logits = self.logits(sources, ids)
        loss = cross_entropy(logits, targets, self.widths.vocab, label_smoothing=label_smoothing)
        return loss * targets.map(lambda local: local != self.pad).to(loss.dtype)
