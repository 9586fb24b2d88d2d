"""What tests of checkpoints save: models, optimizers and folders."""

import contextlib
import io
import random
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

import models
import tulle
from models import batches, build


class Noisy(nn.Module):
    """A classifier whose dropout draws on the random state of its rank."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(models.WORDS, models.WIDTH, sparse=True)
        self.dropout = nn.Dropout()
        self.norm = nn.BatchNorm1d(models.WIDTH)
        self.out = nn.Linear(models.WIDTH, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.dropout(self.norm(self.words(ids).mean(1)))).pow(2).mean()


def optimizers_of(model: nn.Module) -> list:
    return models.sparse_adam_and_adam(model)


def schedulers_of(optimizers: list) -> list[LambdaLR]:
    return [LambdaLR(one, lambda step: 1 / (1 + step)) for one in optimizers]


def train(model: nn.Module, optimizers: list, schedulers: list[LambdaLR], steps: range) -> list[float]:
    """One batch a step, the same on every rank; what differs between ranks is the dropout."""
    losses = []
    for ids in batches(steps.stop, 8)[steps.start :]:
        loss = model(ids)
        loss.backward()
        for one in [*optimizers, *schedulers]:
            one.step()
        for one in optimizers:
            one.zero_grad()
        losses.append(loss.item() + random.random())
    return losses


def saved(state: object) -> Tensor:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8)


def trained(kind=Noisy, seed: int = 0) -> tuple[nn.Module, list]:
    model = build(kind, seed)
    optimizers = optimizers_of(model)
    train(model, optimizers, [], range(2))
    return model, optimizers


@contextlib.contextmanager
def good_checkpoint(folder: Path) -> Iterator[Path]:
    """A checkpoint in a folder; random states are those of the test again afterwards."""
    with torch.random.fork_rng():
        tulle.save(folder / "checkpoint", *trained(), step=2, note="good")
        yield folder / "checkpoint"


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def state_of(model: nn.Module, optimizers: list) -> object:
    return [model.state_dict(), [one.state_dict() for one in optimizers]]


def fails_halfway(error: BaseException):
    """A `torch.save` that writes half of its bytes."""
    complete = torch.save

    def save(state: object, file: io.BufferedIOBase, **options: bool) -> None:
        if isinstance(file, io.BytesIO):  # the look at `extra`, or what ranks tell each other
            complete(state, file, **options)
            return
        buffer = io.BytesIO()
        complete(state, buffer)
        file.write(buffer.getvalue()[: len(buffer.getvalue()) // 2])
        raise error

    return save
