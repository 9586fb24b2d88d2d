"""A Transformer that translates, and its beam search: plain PyTorch that knows nothing of the processes it runs on."""

import math
from argparse import Namespace
from collections.abc import Iterable, Sequence
from typing import cast

import torch
import torch.nn.functional as F
from parallel_text import BEGIN, END, PAD
from torch import Tensor, nn


class Attention(nn.Module):
    """Multi-head attention: every position of one sequence gathers what it needs from another, or from itself."""

    def __init__(self, width: int, heads: int, dropout: float):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.query, self.key_value = nn.Linear(width, width), nn.Linear(width, 2 * width)
        self.output = nn.Sequential(nn.Linear(width, width), nn.Dropout(dropout))

    def keys_values(self, memory: Tensor) -> Tensor:  # [batch, length, width] -> [2, batch, heads, length, -1]
        return self.key_value(memory).unflatten(-1, (2, self.heads, -1)).permute(2, 0, 3, 1, 4)

    def forward(self, state: Tensor, memory: Tensor, mask: Tensor | None = None, *, causal: bool = False) -> Tensor:
        query = self.query(state).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, *memory, attn_mask=mask, is_causal=causal, dropout_p=dropout)
        return self.output(mixed.transpose(1, 2).flatten(2))


def feed_forward(width: int, dropout: float) -> nn.Sequential:
    inner, outer = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
    return nn.Sequential(nn.LayerNorm(width), inner, nn.ReLU(), outer, nn.Dropout(dropout))


class EncoderLayer(nn.Module):
    """Attention within the sentence, then a feed-forward network; each is added to what came in."""

    def __init__(self, width: int, heads: int, dropout: float):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(width), Attention(width, heads, dropout)
        self.feed_forward = feed_forward(width, dropout)

    def forward(self, state: Tensor, mask: Tensor) -> Tensor:
        normed = self.norm(state)
        state = state + self.attention(normed, self.attention.keys_values(normed), mask)
        return state + self.feed_forward(state)


class DecoderLayer(nn.Module):
    """As the encoder's, but it looks back only, and looks at the source in between."""

    def __init__(self, width: int, heads: int, dropout: float):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(width), Attention(width, heads, dropout)
        self.source_norm, self.source_attention = nn.LayerNorm(width), Attention(width, heads, dropout)
        self.feed_forward = feed_forward(width, dropout)

    def forward(self, state: Tensor, source: Tensor, mask: Tensor, past: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Also return the keys and values of all positions so far: the next position's `past`."""
        normed = self.norm(state)
        own = self.attention.keys_values(normed)
        own = own if past is None else torch.cat([past, own], dim=3)
        state = state + self.attention(normed, own, causal=past is None)
        state = state + self.source_attention(self.source_norm(state), source, mask)
        return state + self.feed_forward(state), own


class Translator(nn.Module):
    """The Transformer of "Attention Is All You Need" (2017), with its layer norms moved in front (pre-norm)."""

    def __init__(self, options: Namespace, words: int):
        super().__init__()
        width, heads, dropout, sparse = options.width, options.heads, options.dropout, not options.dense_embeddings
        self.source_table = nn.Embedding(words, width, padding_idx=PAD, sparse=sparse)
        self.target_table = nn.Embedding(words, width, padding_idx=PAD, sparse=sparse)
        for table in (self.source_table, self.target_table):
            nn.init.normal_(table.weight, std=width**-0.5)
        self.encoder = nn.ModuleList(EncoderLayer(width, heads, dropout) for _ in range(options.layers[0]))
        self.decoder = nn.ModuleList(DecoderLayer(width, heads, dropout) for _ in range(options.layers[1]))
        self.encoder_norm, self.decoder_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.projection = nn.Linear(width, words)
        self.dropout, self.label_smoothing = nn.Dropout(dropout), options.label_smoothing

    def embed(self, table: nn.Embedding, ids: Tensor, first: int = 0) -> Tensor:
        width, positions = table.embedding_dim, torch.arange(first, first + ids.shape[1], device=ids.device)
        rates = torch.exp(torch.arange(0, width, 2, device=ids.device) * (-math.log(10_000) / width))
        angles = positions[:, None] * rates
        return self.dropout(table(ids) * math.sqrt(width) + torch.cat([angles.sin(), angles.cos()], dim=-1))

    def encode(self, source: Tensor) -> tuple[list[Tensor], Tensor]:
        """Return, for each decoder layer, the keys and values of the source, and the mask of its real tokens."""
        state, mask = self.embed(self.source_table, source), (source != PAD)[:, None, None, :]
        for layer in self.encoder:
            state = layer(state, mask)
        state = self.encoder_norm(state)
        layers = cast("Iterable[DecoderLayer]", self.decoder)
        return [layer.source_attention.keys_values(state) for layer in layers], mask

    def decode(
        self, target: Tensor, memory: list[Tensor], mask: Tensor, past: list[Tensor] | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the states of `target`, [batch, length, width], and each layer's keys and values so far."""
        state = self.embed(self.target_table, target, first=past[0].shape[3] if past else 0)
        present = []
        for number, layer in enumerate(self.decoder):
            state, own = layer(state, memory[number], mask, past[number] if past else None)
            present.append(own)
        return self.decoder_norm(state), present

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Return the sum of the losses of the target's tokens; nothing is computed for padding's logits."""
        states, _ = self.decode(target[:, :-1], *self.encode(source))
        real, smoothing = target[:, 1:] != PAD, self.label_smoothing if self.training else 0.0
        logits = self.projection(states[real])
        return F.cross_entropy(logits, target[:, 1:][real], label_smoothing=smoothing, reduction="sum")


def pad(sequences: Sequence[list[int]], device: torch.device) -> Tensor:
    tensors = [torch.tensor(ids) for ids in sequences]
    return nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=PAD).to(device)


@torch.no_grad()
def beam_search(model: Translator, source: Tensor, beam: int) -> list[list[int]]:
    """Of `beam` translations of each sentence of `source`, [sentences, length], the likeliest per token."""
    memory, mask = model.encode(source.repeat_interleave(beam, dim=0))
    texts = source.new_full((len(source), beam, 1), BEGIN)
    scores = torch.zeros(len(source), beam, device=source.device)
    scores[:, 1:] = -math.inf  # all beams begin alike: only the first counts
    past = None
    for _ in range(2 * source.shape[1] + 5):
        ended = (texts[..., -1] == END) | (texts[..., -1] == PAD)
        if ended.all():
            break
        states, past = model.decode(texts[..., -1:].flatten(0, 1), memory, mask, past)
        steps = model.projection(states[:, -1]).float().log_softmax(-1).unflatten(0, (-1, beam))
        steps[ended] = -math.inf  # an ended text goes on with padding, at no cost
        steps[..., PAD] = torch.where(ended, 0.0, -math.inf)
        totals = (scores[..., None] + steps).flatten(1)
        lengths = (texts != PAD).sum(-1) - ended.long()
        best = (totals / lengths.repeat_interleave(steps.shape[-1], dim=1)).topk(beam).indices
        scores, origins = totals.gather(1, best), best // steps.shape[-1]
        texts = torch.cat([texts.gather(1, origins[..., None].expand_as(texts)), best[..., None] % steps.shape[-1]], -1)
        rows = (origins + torch.arange(len(source), device=source.device)[:, None] * beam).flatten()
        past = [keys_values[:, rows] for keys_values in past]
    return texts[:, 0, 1:].tolist()
