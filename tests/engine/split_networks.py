"""Embeddings and bags of every kind, to be split, and how far a model is from one that is not."""

import torch
from torch import nn

from tulle.tables import split_of

ROWS, WIDTH = 40, 6


class Lookup(nn.Module):
    """One embedding, or bags of one, and a layer above."""

    def __init__(self, table: nn.Embedding | nn.EmbeddingBag, *, is_weighted: bool = False) -> None:
        super().__init__()
        self.table = table
        self.out = nn.Linear(WIDTH, 3)
        self.is_weighted = is_weighted

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        weights = torch.linspace(-1, 1, ids.numel(), dtype=torch.float64).view(ids.shape) if self.is_weighted else None
        found = self.table(ids, per_sample_weights=weights) if self.is_weighted else self.table(ids)
        return self.out(found).tanh().pow(2).flatten(1).mean()


KINDS = {
    "embedding": lambda: Lookup(nn.Embedding(ROWS, WIDTH)),
    "padding": lambda: Lookup(nn.Embedding(ROWS, WIDTH, padding_idx=1, sparse=True)),
    "max_norm": lambda: Lookup(nn.Embedding(ROWS, WIDTH, max_norm=0.5)),
    "scale_grad_by_freq": lambda: Lookup(nn.Embedding(ROWS, WIDTH, scale_grad_by_freq=True)),
    "sum": lambda: Lookup(nn.EmbeddingBag(ROWS, WIDTH, mode="sum", sparse=True, padding_idx=0)),
    "mean": lambda: Lookup(nn.EmbeddingBag(ROWS, WIDTH, mode="mean", sparse=True)),
    "max": lambda: Lookup(nn.EmbeddingBag(ROWS, WIDTH, mode="max")),
    "bag max_norm": lambda: Lookup(nn.EmbeddingBag(ROWS, WIDTH, mode="mean", max_norm=0.3)),
    "weighted": lambda: Lookup(nn.EmbeddingBag(ROWS, WIDTH, mode="sum"), is_weighted=True),
    "frozen": lambda: Lookup(nn.Embedding.from_pretrained(torch.randn(ROWS, WIDTH, dtype=torch.float64))),
}


class Pair(nn.Module):
    """Two embeddings."""

    def __init__(self, first: nn.Embedding, second: nn.Embedding) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        found = self.first(ids[:, :-1]) * self.second(ids[:, 1:])
        return (found if mask is None else found[mask]).pow(2).mean()


def build(kind: str, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return KINDS[kind]().double()


def worst(model: nn.Module, reference: nn.Module) -> float:
    theirs = dict(reference.named_parameters())
    found = [0.0]
    for name, parameter in model.named_parameters():
        split = split_of(parameter)
        expected = theirs[name] if split is None else split.take(theirs[name])
        found.append((parameter - expected).abs().max().item() / max(1e-3, expected.abs().max().item()))
    return max(found)


def step(model, optimizers, losses) -> None:
    for loss in losses:
        loss.backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
