"""One rank: the same model kept in step in each way, in turns, so that what else the machine does hits all alike."""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.optim import Adam

import tulle
from tulle.comm import traffic
from tulle.engine import data_parallel

WAYS = {"at the step": "step", "at the read, as they come": "read", "at the read, by urgency": "read"}


class Sleep(torch.autograd.Function):
    """Stands for the work of an accelerator: takes its time, and twice that in backward, without a core."""

    @staticmethod
    def forward(ctx: FunctionCtx, hidden: Tensor, seconds: float) -> Tensor:
        """`hidden`, later."""
        ctx.seconds = seconds  # type: ignore[attr-defined]
        time.sleep(seconds)
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor) -> tuple[Tensor, None]:
        """The gradient, later still."""
        time.sleep(2 * ctx.seconds)  # type: ignore[attr-defined]
        return gradients[0], None


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
        data_parallel._REORDERED_AFTER = 4 if way.endswith("urgency") else -1
        self.steps(5)

    def steps(self, count: int) -> tuple[float, float]:
        """Seconds of a step, the last of which ends when all updates are done, and of it those spent waiting."""
        dist.barrier()
        begin_s, waited_s = time.perf_counter(), traffic.wait_s
        for _ in range(count):
            self.model(self.batch).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.model.state_dict()
        dist.barrier()
        return (time.perf_counter() - begin_s) / count, (traffic.wait_s - waited_s) / count


def main() -> None:
    """Take turns; rank 0 prints seconds of a step, and of waiting in it, by way and turn."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--width", type=int, required=True)
    parser.add_argument("--layer-ms", type=float, required=True)
    parser.add_argument("--samples", type=int, required=True)
    parser.add_argument("--turns", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    arguments = parser.parse_args()
    mesh = tulle.init(data=-1)
    runs = {way: Run(way, arguments, mesh) for way in WAYS}
    found = {way: [] for way in WAYS}
    for _ in range(arguments.turns):
        for way, run in runs.items():
            found[way].append(run.steps(arguments.steps))
    first, *others = [run.model.state_dict()["layers.0.weight"] for run in runs.values()]
    difference = max(float((first - other).abs().max()) for other in others)
    if mesh.rank == 0:
        print(json.dumps({"ways": found, "largest difference of a weight": difference}), flush=True)


if __name__ == "__main__":
    main()
