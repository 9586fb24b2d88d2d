"""Beam search with an encoder-decoder, one position at a time: keys and values of those before are kept, not redone."""

from __future__ import annotations

from typing import cast

import torch

from tulle.named.dims import Dim
from tulle.named.layers.transformer import Block, EncoderDecoder, KeysValues, Source
from tulle.named.lookup import gather
from tulle.named.pointwise import equal, full, where
from tulle.named.pointwise import range as positions_along
from tulle.named.reduction import log_softmax
from tulle.named.reduction import sum as named_sum
from tulle.named.reshape import merge
from tulle.named.selection import argmax, top_k
from tulle.named.tensor import Tensor

_NEVER = -1e9
"""The score of what must not be chosen."""


@torch.no_grad()
def beam_search(
    model: EncoderDecoder, sources: Tensor, beam: Dim, *, begin: int, end: int, alpha: float = 0.6
) -> Tensor:
    """The most probable sequences that a model writes, `(batch, length)`, after `end` filled up with `end`.

    Beams are a dimension of their own, which the layout may split as any other. Every rank must call it.

    Args:
        model: What reads and writes; it writes as many positions as its target has.
        sources: What is read: `(batch, source length)`.
        beam: How many sequences to follow at once.
        begin: The word before the first.
        end: The word after the last.
        alpha: Scores are divided by `((5 + words) / 6) ** alpha`: 0 prefers short sequences.

    Source: Wu et al., *Google's Neural Machine Translation System* (2016), section 7.
    """
    batch = next(dim for dim in sources.dims if dim != model.source[0])
    return _Search(model, model.encode(sources), batch, beam, end).run(begin, alpha)


class _Search:
    """The beams of one batch: their words, scores, and each layer's keys and values so far."""

    def __init__(self, model: EncoderDecoder, source: list[Source], batch: Dim, beam: Dim, end: int) -> None:
        self.model, self.source, self.batch, self.beam, self.end = model, source, batch, beam, end
        self.old = Dim(f"{beam.name}_before", beam.size)
        """The beams, when the next ones are chosen among them."""
        self.blocks = [cast("Block", block) for block in model.decoder.blocks]
        self.length, self.memory = model.target
        first = equal(positions_along(beam), 0)
        self.scores = where(first, full((batch, beam), 0.0), _NEVER)
        self.words = full((batch, beam, self.length), end, dtype=torch.int64)
        self.done = full((batch, beam), False, dtype=torch.bool)
        self.past: list[KeysValues] = [self._nothing(block) for block in self.blocks]

    def run(self, begin: int, alpha: float) -> Tensor:
        """Write word by word, then choose the best beam."""
        word = full((self.batch, self.beam), begin, dtype=torch.int64)
        for position in range(self.length.size):
            word = self._choose(self._logits(word, position), position)
        words = named_sum(where(equal(self.words, self.end), 0.0, full(self.words.dims, 1.0)), self.length)
        best = argmax(self.scores / ((words + 6) * (1 / 6)) ** alpha, self.beam)
        return gather(self.words, best, self.beam)

    def _logits(self, word: Tensor, position: int) -> Tensor:
        """For each beam and word; the position's own keys and values join those kept."""
        x = self.model.embed(word)
        bias = self.model.decoder.bias(full((), position, dtype=torch.int64), self.memory)
        here = equal(positions_along(self.memory), position)
        for place, block in enumerate(self.blocks):
            key, value = block.attention.keys_values(block.norm(x))
            kept_key, kept_value = self.past[place]
            self.past[place] = where(here, key, kept_key), where(here, value, kept_value)
            x = block.step(x, self.past[place], self.memory, bias, self.source[place])
        return self.model.decoder.norm(x).dot(self.model.table, self.model.widths.d_model)

    def _choose(self, logits: Tensor, position: int) -> Tensor:
        """The best continuations of all beams together; a beam that is done goes on with `end` at no cost."""
        vocab, each = self.model.widths.vocab, Dim("beam_continuation", self.beam.size)
        ended = where(equal(positions_along(vocab), self.end), full((), 0.0), _NEVER)
        likely = where(self.done, ended, log_softmax(logits, vocab)) + self.scores
        scores, words = top_k(likely.rename(**{self.beam.name: self.old}), vocab, each)
        both = Dim("beam_candidate", self.beam.size**2)
        self.scores, chosen = top_k(merge(scores, (self.old, each), both), both, self.beam)
        word = gather(merge(words, (self.old, each), both), chosen, both)
        source = chosen.map(lambda local: local // each.size)
        self.past = [(self._follow(key, source), self._follow(value, source)) for key, value in self.past]
        here = equal(positions_along(self.length), position)
        self.words = where(here, word, self._follow(self.words, source))
        self.done = self._follow(self.done, source) | equal(word, self.end)
        return word

    def _follow(self, kept: Tensor, source: Tensor) -> Tensor:
        """What each beam has of the one that it continues."""
        return gather(kept.rename(**{self.beam.name: self.old}), source, self.old)

    def _nothing(self, block: Block) -> KeysValues:
        dims = (self.batch, self.beam, self.memory)
        widths = block.attention
        own = tuple(dim for dim in widths.key.dims if dim != widths.d_model)
        nothing = full((*dims, *own), 0.0, dtype=widths.key.dtype)
        return nothing, nothing
