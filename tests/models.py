"""Small models and batches that tests of several rooms train, and how to hold them against one process."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, SparseAdam

from tulle.parts import local_of
from tulle.tables import split_of

WORDS = 40
WIDTH = 6


class Words(nn.Module):
    """A classifier with a word table, a tag table in bags, a layer that is never used, and a frozen one."""

    def __init__(self, *, is_sparse: bool = True) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH, sparse=is_sparse, padding_idx=0)
        self.tags = nn.EmbeddingBag(WORDS, WIDTH, sparse=is_sparse, mode="sum")
        self.never = nn.Embedding(WORDS, WIDTH, sparse=is_sparse)
        self.hidden = nn.Linear(WIDTH, WIDTH)
        self.unused = nn.Linear(WIDTH, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(requires_grad=False)
        self.out = nn.Linear(WIDTH, 1)

    def forward(self, ids: Tensor) -> Tensor:
        """Mean loss of a batch `[samples, length]`."""
        mixed = self.words(ids).mean(1) + self.tags(ids % 7)
        return self.out(torch.tanh(self.frozen(self.hidden(mixed)))).pow(2).mean()


class Tied(nn.Module):
    """A language model whose one table is looked up, sparse, and multiplied with, dense."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH, sparse=True)
        self.out = nn.Linear(WIDTH, WORDS, bias=False)
        self.out.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        """Mean loss of predicting each next word of `[samples, length]`."""
        scores = self.out(self.words(ids[:, :-1]))
        return nn.functional.cross_entropy(scores.flatten(0, 1), ids[:, 1:].flatten())


class Dense(nn.Module):
    """Layers only, with channels-last weights, a scalar parameter and a buffer that forward writes."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(1, 4, 3).to(memory_format=torch.channels_last)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.out = nn.Linear(4, 1)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.calls: Tensor

    def forward(self, ids: Tensor) -> Tensor:
        """Mean loss of a batch `[samples, length]`, read as small pictures."""
        self.calls += 1
        pictures = ids[:, :, None].to(self.scale.dtype).expand(-1, -1, ids.shape[1])[:, None] / WORDS
        seen = self.convolution(pictures).relu().mean((2, 3))
        return (self.out(seen) * self.scale).pow(2).mean()


@dataclass(frozen=True)
class Recipe:
    """How to make a model's optimizers."""

    name: str
    make: Callable[[nn.Module], Sequence[Optimizer]]

    def __repr__(self) -> str:
        return self.name


def split(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Parameters of sparse tables, and the trained others."""
    tables = [m.weight for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.sparse]
    others = [p for p in model.parameters() if p.requires_grad and all(p is not table for table in tables)]
    return tables, others


# Module-level functions, because ranks find them by name.
def sgd(model: nn.Module) -> list[Optimizer]:
    return [SGD(model.parameters(), lr=0.1)]


def momentum(model: nn.Module) -> list[Optimizer]:
    return [SGD(model.parameters(), lr=0.1, momentum=0.9)]


def adagrad(model: nn.Module) -> list[Optimizer]:
    return [Adagrad(model.parameters(), lr=0.1)]


def sparse_adam_and_adam(model: nn.Module) -> list[Optimizer]:
    tables, others = split(model)
    return [SparseAdam(tables, lr=0.01), Adam(others, lr=0.01)]


def sparse_adam_and_adamw(model: nn.Module) -> list[Optimizer]:
    tables, others = split(model)
    return [SparseAdam(tables, lr=0.01), AdamW(others, lr=0.01, weight_decay=0.1)]


def adam(model: nn.Module) -> list[Optimizer]:
    return [Adam(model.parameters(), lr=0.01)]


def adamw(model: nn.Module) -> list[Optimizer]:
    return [AdamW(model.parameters(), lr=0.01, weight_decay=0.1)]


def batches(steps: int, samples: int, length: int = 5) -> list[Tensor]:
    """`steps` global batches of word numbers `[samples, length]`, skewed as words are, the same on every rank."""
    generator = torch.Generator().manual_seed(7)
    weights = 1.0 / torch.arange(1, WORDS + 1)
    return [
        torch.multinomial(weights, samples * length, replacement=True, generator=generator).view(samples, length)
        for _ in range(steps)
    ]


def build(kind: Callable[[], nn.Module], seed: int) -> nn.Module:
    """A model in float64 with weights that depend on the seed."""
    torch.manual_seed(seed)
    return kind().double()


def worst_difference(model: nn.Module, reference: nn.Module) -> tuple[float, str]:
    """The largest relative difference of a parameter or buffer, and its name."""
    theirs = reference.state_dict()
    found = [
        ((value - theirs[name]).abs().max().item() / max(theirs[name].abs().max().item(), 1e-3), name)
        for name, value in model.state_dict().items()
    ]
    return max(found)


def difference_of_parts(
    model: nn.Module, optimizers: Sequence[Optimizer], reference: nn.Module, theirs: Sequence[Optimizer]
) -> tuple[float, str]:
    """The largest relative difference of a parameter of a distributed model, or of its state, and its name.

    Of a split table each rank holds its part against that part of the reference's.
    """
    for optimizer in optimizers:
        optimizer.state_dict()  # so that what waits is done
    whole_of = dict(reference.named_parameters())
    found: list[tuple[float, str]] = []
    for name, parameter in model.named_parameters():
        pairs: list[tuple[str, object, object]] = [(name, parameter, whole_of[name])]
        for mine, their in zip(optimizers, theirs, strict=True):
            state, expected = mine.state.get(parameter, {}), their.state.get(whole_of[name], {})
            assert state.keys() == expected.keys(), f"{name} has the state {[*state]}, expected {[*expected]}"
            pairs += [(f"{key} of {name}", state[key], value) for key, value in expected.items() if value is not None]
        for what, ours, value in pairs:
            part, whole = (local_of(torch.as_tensor(one)).to_dense() for one in (ours, value))
            split = split_of(parameter)
            if split is not None and whole.shape == split.shape:
                whole = split.take(whole)
            assert part.shape == whole.shape, f"{what} has shape {part.shape}, expected {whole.shape}"
            found.append(((part - whole).abs().max().item() / max(1e-3, whole.abs().max().item()), what))
    return max(found)
