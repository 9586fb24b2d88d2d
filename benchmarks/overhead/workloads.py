"""The models that the overhead of tulle is measured on, each as one class called with one batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn


class Translator(nn.Module):
    """A Transformer encoder with a softmax over words: 9.3 million dense parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(8000, 256)
        layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
        self.out = nn.Linear(256, 8000)

    def forward(self, ids: Tensor) -> Tensor:
        """Mean loss of `[samples, length]` word numbers."""
        return nn.functional.cross_entropy(self.out(self.layers(self.words(ids))).flatten(0, 1), ids.flatten())


class Chain(nn.Module):
    """Sixty narrow layers: many small gradients, where what a library does for each of them shows most."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(60)])

    def forward(self, x: Tensor) -> Tensor:
        """Mean square of the output for `[samples, 256]`."""
        return self.layers(x).pow(2).mean()


class Many(nn.Module):
    """A thousand tiny parameters, where all that is left is what a library does for each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(512)])

    def forward(self, x: Tensor) -> Tensor:
        """Mean square of the output for `[samples, 8]`."""
        return self.layers(x).pow(2).mean()


class Recommender(nn.Module):
    """A table of `rows` x 128 with sparse gradients under a small head."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, 128, sparse=True)
        self.head = nn.Linear(128, 1)

    def forward(self, ids: Tensor) -> Tensor:
        """Mean square of the score of each of `[tokens]` ids."""
        return self.head(self.table(ids)).pow(2).mean()


class Features(nn.Module):
    """Ten tables of 50,000 x 64 with sparse gradients, looked up side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(50_000, 64, sparse=True) for _ in range(10))
        self.head = nn.Linear(10 * 64, 1)

    def forward(self, ids: Tensor) -> Tensor:
        """Mean square of the score of each of `[tokens]` ids."""
        # Not their sum: plain DDP gives wrong gradients of tables whose rows are added (benchmarks/user-reports).
        return self.head(torch.cat([table(ids) for table in self.tables], dim=-1)).pow(2).mean()


@dataclass(frozen=True)
class Workload:
    """A model and how to draw a batch for it."""

    model: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Tensor]


def zipf(tokens: int, rows: int, generator: torch.Generator, exponent: float = 1.1) -> Tensor:
    """`tokens` ids in `0..rows-1`, Zipf-distributed, the most frequent first."""
    weights = torch.arange(1, rows + 1, dtype=torch.float64).pow(-exponent)
    cumulative = weights.cumsum(0)
    drawn = torch.rand(tokens, dtype=torch.float64, generator=generator) * cumulative[-1]
    return torch.searchsorted(cumulative, drawn)


WORKLOADS = {
    "translator": Workload(Translator, lambda g: torch.randint(8000, (8, 32), generator=g)),
    "chain": Workload(Chain, lambda g: torch.randn(256, 256, generator=g)),
    "many": Workload(Many, lambda g: torch.randn(8, 8, generator=g)),
    "recommender": Workload(lambda: Recommender(500_000), lambda g: zipf(2048, 500_000, g)),
    "features": Workload(Features, lambda g: torch.randint(50_000, (512,), generator=g)),
    "few": Workload(lambda: Recommender(2000), lambda g: torch.randint(2000, (2048,), generator=g)),
}
