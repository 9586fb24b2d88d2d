"""One rank: the same model shared out in each way, in turns, so that what else the machine does hits all alike."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import AdamW

import tulle
from tulle import memory
from tulle.comm import traffic
from tulle.memory.ahead import Ahead
from tulle.memory.leaving import Reduced
from tulle.memory.unit import Unit
from tulle.plan import Memory, Plan

sys.path.insert(0, str(Path(__file__).parents[1] / "cluster"))

from turns import Sleep, take_turns  # pyright: ignore[reportMissingImports]

WAYS = ("one after the other", "beside", "replicas", "torch fully_shard")
WITHIN_HOSTS, TORCH_WITHIN_HOSTS = "within hosts", "torch within hosts"
"""Further ways, where hosts have several ranks."""
RANKS_PER_HOST = int(os.environ["LOCAL_WORLD_SIZE"])


class Layer(nn.Module):
    """Two products as in a Transformer's layer, and some work."""

    def __init__(self, width: int, layer_s: float) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.layer_s = layer_s

    def forward(self, hidden: Tensor) -> Tensor:
        """`[samples, width]` as given."""
        return hidden + Sleep.apply(self.second(self.first(hidden).relu()), self.layer_s)


class Layers(nn.Module):
    """Alike layers between two of the model's own."""

    def __init__(self, layers: int, width: int, layer_s: float) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(width, width), nn.Linear(width, width)
        self.layers = nn.ModuleList([Layer(width, layer_s) for _ in range(layers)])

    def forward(self, hidden: Tensor) -> Tensor:
        """A loss of `[samples, width]`."""
        hidden = self.before(hidden)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.after(hidden).pow(2).mean()


class Waiting(Ahead):
    """As it would be if nothing went beside what computes."""

    def _learn(self, use: Any, call: int) -> None:
        """Nothing."""

    def reduce(self, unit: Unit, gradients: Sequence[Tensor | None], parts: Sequence[Tensor]) -> Reduced:
        """Sums that are there."""
        reduced = super().reduce(unit, gradients, parts)
        reduced.result()
        return reduced


def shard_within_hosts(model: nn.Module, mesh: tulle.Mesh) -> None:
    """Put torch's hybrid sharding on the modules that repeat, and on what is left."""
    shape = mesh.size // RANKS_PER_HOST, RANKS_PER_HOST
    hosts = init_device_mesh(mesh.device.type, shape, mesh_dim_names=("replicate", "shard"))
    for name in memory.repeated(model):
        fully_shard(model.get_submodule(name), mesh=hosts)
    fully_shard(model, mesh=hosts)


class Run:
    """The model shared out in one way."""

    def __init__(self, way: str, arguments: argparse.Namespace, mesh: tulle.Mesh) -> None:
        torch.manual_seed(0)
        self.model = Layers(arguments.layers, arguments.width, arguments.layer_ms / 1e3)
        if way == TORCH_WITHIN_HOSTS:
            shard_within_hosts(self.model, mesh)
        elif way.startswith("torch"):
            memory.shard_fully(self.model, mesh)
        self.optimizer = AdamW(self.model.parameters(), lr=1e-4)
        if not way.startswith("torch"):
            plan = Plan(mesh.shape, memory=Memory(full_shard="host" if way == WITHIN_HOSTS else way != "replicas"))
            tulle.distribute(self.model, self.optimizer, mesh, plan=plan)
        if way == WAYS[0]:
            for module in self.model.modules():
                ahead = module.__dict__.get("_tulle_ahead")
                if ahead is not None:
                    ahead.__class__ = Waiting
        self.batch = torch.randn(arguments.samples, arguments.width, generator=torch.Generator().manual_seed(mesh.rank))
        self.steps(4)

    def steps(self, count: int) -> dict[str, float]:
        """Of a step: seconds, those of them in which this rank's cores worked, and megabytes sent."""
        dist.barrier()
        begin_s, cores_s, sent_bytes = time.perf_counter(), time.process_time(), traffic.total.bytes_sent
        for _ in range(count):
            self.model(self.batch).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        dist.barrier()
        return {
            "step_s": (time.perf_counter() - begin_s) / count,
            "cores_s": (time.process_time() - cores_s) / count,
            "sent_bytes": (traffic.total.bytes_sent - sent_bytes) / count,
        }

    def weight(self) -> Tensor:
        """One of the weights, whole."""
        return memory.whole_state_dict(self.model)["layers.0.first.weight"]


if __name__ == "__main__":
    take_turns([*WAYS, *([WITHIN_HOSTS, TORCH_WITHIN_HOSTS] if RANKS_PER_HOST > 1 else [])], Run)
