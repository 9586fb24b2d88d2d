"""One rank: the same model kept in step in each way, in turns, so that what else the machine does hits all alike."""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Adam

import tulle
from tulle.comm import traffic
from tulle.engine import reducer

sys.path.insert(0, str(Path(__file__).parents[1] / "cluster"))

from turns import Sleep, take_turns  # pyright: ignore[reportMissingImports]

WAYS = {"at the step": "step", "at the read, as they come": "read", "at the read, by urgency": "read"}


class Layers(nn.Module):
    """Layers of which each reads its weights, and then works for a while."""

    def __init__(self, layers: int, width: int, layer_s: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
        self.layer_s = layer_s

    def forward(self, hidden: Tensor) -> Tensor:
        """A loss of `[samples, width]`."""
        for layer in self.layers:
            hidden = Sleep.apply(layer(hidden).tanh(), self.layer_s)
        return hidden.pow(2).mean()


class Run:
    """The model kept in step in one way."""

    def __init__(self, way: str, arguments: argparse.Namespace, mesh: tulle.Mesh) -> None:
        torch.manual_seed(0)
        self.model = Layers(arguments.layers, arguments.width, arguments.layer_ms / 1e3)
        self.optimizer = Adam(self.model.parameters(), lr=1e-4)
        plan = replace(tulle.plan(self.model, self.optimizer, mesh), schedule=WAYS[way])
        tulle.distribute(self.model, self.optimizer, mesh, plan=plan)
        self.batch = torch.randn(arguments.samples, arguments.width, generator=torch.Generator().manual_seed(mesh.rank))
        reducer._REORDERED_AFTER = 4 if way.endswith("urgency") else -1
        self.steps(5)

    def steps(self, count: int) -> dict[str, float]:
        """Seconds of a step, the last of which ends when all updates are done, and of it those spent waiting."""
        dist.barrier()
        begin_s, waited_s = time.perf_counter(), traffic.wait_s
        for _ in range(count):
            self.model(self.batch).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.model.state_dict()
        dist.barrier()
        return {
            "step_s": (time.perf_counter() - begin_s) / count,
            "waited_s": (traffic.wait_s - waited_s) / count,
        }

    def weight(self) -> Tensor:
        """One of the weights."""
        return self.model.state_dict()["layers.0.weight"]


if __name__ == "__main__":
    take_turns(WAYS, Run)
