"""Models whose updates wait until parameters are read, and a step of one beside its reference."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import (
    Optimizer,
)

import models
import tulle
from models import batches, build
from tulle.comm import barrier, lane
from tulle.engine import engine_of
from tulle.engine.late_tensors import LateParameter
from tulle.engine.late_updates import LateUpdates

STEPS = 7  # more than after which the order of pieces is changed
SAMPLES = 12
TOLERANCE = 1e-12


class Deep(nn.Module):
    """Many layers: an attention and an LSTM, which read their weights by functions, and a bias that is read twice."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(models.WORDS, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.memory = nn.LSTM(8, 8, batch_first=True)
        self.out = nn.Linear(8, 1)

    def forward(self, ids: Tensor) -> Tensor:
        """Mean loss of a batch `[samples, length]`."""
        hidden = self.words(ids)
        hidden = hidden + self.attention(hidden, hidden, hidden, need_weights=False)[0]
        for layer in self.layers:
            hidden = layer(hidden).tanh() + self.layers[0].bias
        return self.out(self.memory(hidden)[0]).pow(2).mean()


class Normed(nn.Module):
    """Batch norm between layers: buffers that follow rank 0."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(models.WORDS, 8)
        self.norm = nn.BatchNorm1d(8)
        self.out = nn.Linear(8, 1)

    def forward(self, ids: Tensor) -> Tensor:
        """Mean loss of a batch `[samples, length]`."""
        return self.out(self.norm(self.words(ids).mean(1))).pow(2).mean()


def late(model: nn.Module, optimizer: Any, mesh: tulle.Mesh) -> LateUpdates:
    """Distribute a model so that its updates wait, in many small buckets cut into smaller pieces."""
    plan = replace(tulle.plan(model, optimizer, mesh), schedule="read", bucket_bytes=300)
    tulle.distribute(model, optimizer, mesh, plan=plan)
    updates = engine_of(model).late
    assert updates is not None
    return updates


def late_names(model: nn.Module) -> list[str]:
    """Parameters whose update waits."""
    return [name for name, parameter in model.named_parameters() if type(parameter) is LateParameter]


def step(optimizers: Sequence[Optimizer]) -> None:
    """One step of each, and no gradients."""
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def states_differ(ours: Sequence[Optimizer], theirs: Sequence[Optimizer]) -> float:
    """The largest difference of two optimizers' states, relative to the largest number of that state."""
    worst = 0.0
    for mine, other in zip(ours, theirs, strict=True):
        first, second = mine.state_dict()["state"], other.state_dict()["state"]
        assert first.keys() == second.keys()
        for number, state in second.items():
            assert first[number].keys() == state.keys()
            for name, value in state.items():
                difference = torch.as_tensor(first[number][name] - value).abs().max().item()
                worst = max(worst, difference / max(torch.as_tensor(value).abs().max().item(), 1e-6))
    return worst


def held_back(mesh: tulle.Mesh, act: Callable[[], None]) -> None:
    """On rank 0 `act` before, on the others after rank 0 has done so: what rank 0 does cannot have waited for them."""
    aside = lane(mesh["data"], "held back")
    if mesh.rank:
        barrier(aside)
    act()
    if not mesh.rank:
        barrier(aside)


def after_a_step(mesh: tulle.Mesh) -> tuple[nn.Module, Optimizer, nn.Module, Optimizer]:
    """A model with late updates and its reference, both after a first step, which fixes the order of buckets."""
    model, reference = build(Deep, 0), build(Deep, 0)
    [ours], [theirs] = models.momentum(model), models.momentum(reference)
    late(model, ours, mesh)
    one_step(model, ours, reference, theirs, mesh)
    dict(model.state_dict())  # reads all
    return model, ours, reference, theirs


def one_step(model: nn.Module, ours: Optimizer, reference: nn.Module, theirs: Optimizer, mesh: tulle.Mesh) -> None:
    ids = batches(1, SAMPLES)[0]
    model(ids.chunk(mesh.size)[mesh.rank]).backward()
    reference(ids).backward()
    step([ours])
    step([theirs])
