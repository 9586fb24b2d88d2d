"""One rank of `test_emulated_cuda`: stages give each other lengths, sparse tensors and objects, on a stream."""

import emulated_cuda as emulated  # isort: skip  before torch

import copy
import json
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import tulle
from models import momentum


class Gives(nn.Module):
    """A stage that gives a tensor of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> tuple[Any, ...]:
        """Numbers, lengths on the CPU, a sparse tensor and an object with tensors."""
        diagonal = torch.arange(4, device=x.device).expand(2, 4).contiguous()
        chosen = torch.sparse_coo_tensor(diagonal, torch.ones(4, dtype=x.dtype, device=x.device), (4, 4))
        y = self.layer(x)
        return y, torch.tensor([1, 3, 2, 4]), chosen, torch.distributions.Normal(y.detach()[:, :1], y.detach().exp())


class Takes(nn.Module):
    """A stage that reads them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, y: torch.Tensor, mask: torch.Tensor, chosen: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
        """Mean loss."""
        return self.layer(torch.sparse.mm(chosen, y) * mask.to(y.device) + mean).pow(2).mean()


class Kinds(nn.Module):
    """Both, and a mask made between them on the device of the lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Gives(), Takes()
        self.devices = set[str]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Mean loss of `[4, 4]`."""
        y, lengths, chosen, normal = self.first(x)
        self.devices.add(str(lengths.device))
        mask = torch.arange(4, device=lengths.device)[None] < lengths[:, None]
        return self.second(y, mask, chosen, normal.mean)


if __name__ == "__main__":
    emulated.install(int(os.environ["WORLD_SIZE"]))
    mesh = tulle.init(pipe=2, timeout=30)
    torch.manual_seed(0)
    reference = Kinds().double()
    model = copy.deepcopy(reference).to(mesh.device)
    plan = tulle.Plan(mesh=mesh.shape, stages={"first": 0, "second": 1})
    model, [optimizer] = tulle.distribute(model, momentum(model), mesh, plan=plan)
    [theirs], stream, difference = momentum(reference), torch.cuda.Stream(), 0.0

    @tulle.step(micro_batches=4)
    def step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        loss = model(x)
        loss.backward()
        return loss

    for number in range(3):
        whole = torch.randn(16, 4, generator=torch.Generator().manual_seed(number)).double()
        here = whole.to(mesh.device)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            loss = step(model, here).mean().item()
            optimizer.step()
            optimizer.zero_grad()
        torch.cuda.current_stream().wait_stream(stream)
        expected = torch.stack([reference(part) for part in whole.chunk(4)]).mean()
        expected.backward()
        theirs.step()
        theirs.zero_grad()
        difference = max(difference, abs(loss - expected.item()))
    print(json.dumps({"difference": difference, "device": sorted(model.devices), "races": emulated.races}))
    sys.stdout.flush()
    dist.barrier()
    os._exit(0)
