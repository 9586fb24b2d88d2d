"""Nine models as their users write them, each with its optimizer, and batches whose words follow a power law."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

_EXPONENT = 1.05


def words(count: int, shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Numbers below `count`, of which the k-th most frequent is drawn about k^-1.05 as often as the first."""
    power = 1 - _EXPONENT
    uniform = torch.rand(tuple(shape), generator=generator, dtype=torch.float64)
    places = ((count**power - 1) * uniform + 1) ** (1 / power)
    return (places.long() - 1).clamp(0, count - 1) * 7919 % count  # frequent ones are not neighbours


class Model(nn.Module):
    """One of them; `forward` gives the loss of a batch."""

    def batch(self, generator: torch.Generator) -> tuple[Tensor, ...]:
        raise NotImplementedError

    def optimizer(self) -> Optimizer:
        return torch.optim.Adam(self.parameters())


class SkipGram(Model):
    """word2vec with negative samples; sparse gradients, SparseAdam."""

    count = 200_000

    def __init__(self, *, sparse: bool = True) -> None:
        super().__init__()
        self.sparse = sparse
        self.inner, self.outer = (nn.Embedding(self.count, 128, sparse=sparse) for _ in range(2))
        nn.init.zeros_(self.outer.weight)

    def forward(self, center: Tensor, context: Tensor, negatives: Tensor) -> Tensor:
        inner = self.inner(center)
        right = (inner * self.outer(context)).sum(-1)
        wrong = torch.bmm(self.outer(negatives), inner.unsqueeze(2)).squeeze(2)
        return -(functional.logsigmoid(right).mean() + functional.logsigmoid(-wrong).mean())

    def batch(self, generator: torch.Generator) -> tuple[Tensor, ...]:
        return tuple(words(self.count, shape, generator) for shape in ((2048,), (2048,), (2048, 5)))

    def optimizer(self) -> Optimizer:
        return torch.optim.SparseAdam([*self.parameters()]) if self.sparse else super().optimizer()


class Clicks(Model):
    """A recommender like DLRM: 26 tables of 50 to a million rows; sparse gradients, Adagrad."""

    rows = (1_000_000, 300_000, 100_000, 50_000, 20_000, 10_000, *[5_000] * 6, *[500] * 6, *[50] * 8)

    def __init__(self, *, sparse: bool = True) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, 16, mode="sum", sparse=sparse) for rows in self.rows)
        self.below = nn.Sequential(nn.Linear(13, 64), nn.ReLU(), nn.Linear(64, 16))
        self.above = nn.Sequential(nn.Linear(16 * (1 + len(self.rows)), 256), nn.ReLU(), nn.Linear(256, 1))

    def forward(self, numbers: Tensor, ids: Tensor, clicked: Tensor) -> Tensor:
        found = [table(ids[:, number : number + 1]) for number, table in enumerate(self.tables)]
        scores = self.above(torch.cat([self.below(numbers), *found], 1)).squeeze(1)
        return functional.binary_cross_entropy_with_logits(scores, clicked)

    def batch(self, generator: torch.Generator) -> tuple[Tensor, ...]:
        ids = torch.stack([words(rows, (1024,), generator) for rows in self.rows], 1)
        return torch.rand(1024, 13, generator=generator), ids, torch.rand(1024, generator=generator).round()

    def optimizer(self) -> Optimizer:
        return torch.optim.Adagrad(self.parameters(), lr=0.01)


class TwoTowers(Model):
    """Retrieval with the others of a batch as negatives; dense gradients, Adam."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(100_000, 64), nn.Embedding(50_000, 64)
        self.of_users, self.of_items = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        scores = self.of_users(self.users(users)) @ self.of_items(self.items(items)).T
        return functional.cross_entropy(scores, torch.arange(len(users)))

    def batch(self, generator: torch.Generator) -> tuple[Tensor, ...]:
        return torch.randint(100_000, (1024,), generator=generator), words(50_000, (1024,), generator)


def _encoder(width: int, heads: int, inner: int, layers: int) -> nn.Module:
    layer = nn.TransformerEncoderLayer(width, heads, inner, 0.0, batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


def _causal(length: int) -> Tensor:
    return torch.ones(length, length).triu(1).bool()


class Sequential(Model):
    """The next item of a sequence, by attention (SASRec), scored by the tied table; dense gradients, Adam."""

    count = 30_000

    def __init__(self) -> None:
        super().__init__()
        self.items, self.places, self.body = nn.Embedding(self.count, 64), nn.Embedding(50, 64), _encoder(64, 2, 64, 2)

    def forward(self, items: Tensor, following: Tensor) -> Tensor:
        length = items.shape[1]
        hidden = self.body(self.items(items) + self.places.weight[:length], mask=_causal(length))
        return functional.cross_entropy(hidden[:, -1] @ self.items.weight.T, following)

    def batch(self, generator: torch.Generator) -> tuple[Tensor, ...]:
        return words(self.count, (64, 50), generator), words(self.count, (64,), generator)


class Bags(Model):
    """A classifier of texts (fastText): a large table of bags; sparse gradients, SGD."""

    count = 500_000

    def __init__(self, *, sparse: bool = True) -> None:
        super().__init__()
        self.table, self.out = nn.EmbeddingBag(self.count, 50, sparse=sparse), nn.Linear(50, 20)

    def forward(self, texts: Tensor, kinds: Tensor) -> Tensor:
        return functional.cross_entropy(self.out(self.table(texts)), kinds)

    def batch(self, generator: torch.Generator) -> tuple[Tensor, ...]:
        return words(self.count, (256, 60), generator), torch.randint(20, (256,), generator=generator)

    def optimizer(self) -> Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5)


class Translation(Model):
    """Two GRUs with attention, and one table for source, target and output; dense gradients, Adam."""

    count = 32_000

    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(self.count, 256), nn.Linear(256, self.count, bias=False)
        self.encoder, self.decoder = (nn.GRU(256, 256, batch_first=True) for _ in range(2))
        self.out.weight = self.words.weight

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        read, state = self.encoder(self.words(source))
        written, _ = self.decoder(self.words(target[:, :-1]), state)
        seen = torch.softmax(written @ read.transpose(1, 2), -1) @ read
        return functional.cross_entropy(self.out(written + seen).flatten(0, 1), target[:, 1:].flatten())

    def batch(self, generator: torch.Generator) -> tuple[Tensor, ...]:
        return words(self.count, (16, 20), generator), words(self.count, (16, 20), generator)


class Language(Model):
    """A small GPT with tied output; dense gradients, AdamW."""

    count = 20_000

    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(self.count, 192), nn.Linear(192, self.count, bias=False)
        self.body = _encoder(192, 4, 768, 4)
        self.out.weight = self.words.weight

    def forward(self, text: Tensor) -> Tensor:
        hidden = self.body(self.words(text[:, :-1]), mask=_causal(text.shape[1] - 1))
        return functional.cross_entropy(self.out(hidden).flatten(0, 1), text[:, 1:].flatten())

    def batch(self, generator: torch.Generator) -> tuple[Tensor, ...]:
        return (words(self.count, (4, 65), generator),)

    def optimizer(self) -> Optimizer:
        return torch.optim.AdamW(self.parameters())


class Factors(Model):
    """Matrix factorization with biases; sparse gradients, SGD."""

    def __init__(self, *, sparse: bool = True) -> None:
        super().__init__()
        self.users, self.of_users = nn.Embedding(500_000, 32, sparse=sparse), nn.Embedding(500_000, 1, sparse=sparse)
        self.items, self.of_items = nn.Embedding(100_000, 32, sparse=sparse), nn.Embedding(100_000, 1, sparse=sparse)

    def forward(self, users: Tensor, items: Tensor, ratings: Tensor) -> Tensor:
        biases = (self.of_users(users) + self.of_items(items)).squeeze(1)
        return functional.mse_loss((self.users(users) * self.items(items)).sum(1) + biases, ratings)

    def batch(self, generator: torch.Generator) -> tuple[Tensor, ...]:
        users = torch.randint(500_000, (4096,), generator=generator)
        return users, words(100_000, (4096,), generator), torch.rand(4096, generator=generator)

    def optimizer(self) -> Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Pictures(Model):
    """A convolutional network with batch norm, no table at all; SGD with momentum."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [(3, 32, 1), (32, 64, 2), (64, 128, 2), (128, 256, 2), (256, 256, 1)]
        layers = [
            layer
            for of, to, stride in sizes
            for layer in (nn.Conv2d(of, to, 3, stride, 1, bias=False), nn.BatchNorm2d(to), nn.ReLU())
        ]
        self.body = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 100))

    def forward(self, pictures: Tensor, kinds: Tensor) -> Tensor:
        return functional.cross_entropy(self.body(pictures), kinds)

    def batch(self, generator: torch.Generator) -> tuple[Tensor, ...]:
        return torch.rand(16, 3, 32, 32, generator=generator), torch.randint(100, (16,), generator=generator)

    def optimizer(self) -> Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


MODELS: dict[str, Callable[[], Model]] = {
    "skip-gram": SkipGram,
    "clicks": Clicks,
    "two towers": TwoTowers,
    "next item": Sequential,
    "bags": Bags,
    "translation": Translation,
    "language": Language,
    "factors": Factors,
    "pictures": Pictures,
}
