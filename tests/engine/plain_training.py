"""What tests of the engine share: some steps of a model, and an optimizer that does nothing."""

import torch
from torch import nn

import models
import tulle
from models import batches


def train(model: nn.Module, mesh: tulle.Mesh | None, steps: int = 4) -> None:
    """A few steps of SGD on the whole batch, or on a rank's share of it."""
    [optimizer] = models.sgd(model)
    for ids in batches(steps, 12):
        model(ids.chunk(mesh.size)[mesh.rank] if mesh else ids).backward()
        optimizer.step()
        optimizer.zero_grad()


def dummy(model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer over nothing of the model's: training makes its own."""
    del model
    return torch.optim.SGD([{"params": []}], lr=0.1)
