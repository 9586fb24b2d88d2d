"""One rank of `test_emulated_cuda`: two replicas of two stages, with a table in each, on the emulated device."""

import emulated_cuda as emulated  # isort: skip  before torch

import copy
import json
import os
import random
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import tulle
from models import momentum

TABLES = {"words.weight": (40, 6), "tags.weight": (30, 6)}


class Dawdles(torch.autograd.Function):
    """Takes its time, another on each rank, so that micro-batches and exchanges meet in many orders."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """What comes."""
        time.sleep(0.02 * random.random())
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        """Its gradient."""
        time.sleep(0.02 * random.random())
        return gradient.clone()


class Slow(nn.Linear):
    """A layer that does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As a linear layer."""
        return super().forward(Dawdles.apply(x) if x.is_cuda else x)


class Stages(nn.Module):
    """Two stages with a sparse table each."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.first = nn.Embedding(*TABLES["words.weight"], sparse=True), Slow(6, 6)
        self.tags, self.second = nn.EmbeddingBag(*TABLES["tags.weight"], sparse=True, mode="sum"), Slow(6, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Mean loss of `[samples, length]`."""
        x = self.first(self.words(ids).mean(1)).tanh()
        return self.second(x + self.tags(ids % 30)).pow(2).mean()


def train(mesh: tulle.Mesh, plan: tulle.Plan) -> float:
    """The largest difference of a loss from the CPU's."""
    torch.manual_seed(0)
    reference = Stages().double()
    model = copy.deepcopy(reference).to(mesh.device)
    model, [optimizer] = tulle.distribute(model, momentum(model), mesh, plan=plan)
    [theirs], numbers, data = momentum(reference), torch.Generator().manual_seed(0), mesh["data"]

    @tulle.step(micro_batches=4)
    def step(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
        loss = model(ids)
        loss.backward()
        return loss

    worst = 0.0
    for _ in range(5):
        whole = torch.randint(40, (32, 5), generator=numbers)
        loss = step(model, whole.chunk(data.size)[data.rank].to(mesh.device)).mean().to(mesh.device)
        expected = reference(whole)
        expected.backward()
        for one in (optimizer, theirs):
            one.step()
            one.zero_grad()
        dist.all_reduce(loss, group=data.group)
        worst = max(worst, abs(loss.item() / data.size - expected.item()))
    return worst


if __name__ == "__main__":
    emulated.install(int(os.environ["WORLD_SIZE"]))
    mesh = tulle.init(data=2, pipe=2, timeout=30)
    random.seed(mesh.rank)
    plan = tulle.Plan(mesh=mesh.shape, stages={"words": 0, "first": 0, "tags": 1, "second": 1})
    told = {"rows": train(mesh, plan.with_rows_split(TABLES, "a test")), "replicas": train(mesh, plan)}
    print(json.dumps(told | {"races": emulated.races, "messages": emulated.messages}))
    sys.stdout.flush()
    dist.barrier()
    os._exit(0)
