"""Two layers so wide that data parallelism waits for the network: trained so, and under the layout that is found."""

from __future__ import annotations

import math
import time
from dataclasses import asdict, replace
from statistics import median

import torch
import torch.distributed as dist

import tulle
from tulle import named as tn
from tulle.mesh import Mesh
from tulle.named.rates import Rates, speeds

batch, d, f = tn.dims(batch=256, d_model=512, d_ff=16384)
NUMBERS = torch.randn(batch.size, d.size, generator=torch.Generator().manual_seed(0))


class Wide(tn.Module):
    """Up and down again: 33 MB of parameters for each layer."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = tn.param(d, f), tn.param(f, d)

    def forward(self, x: tn.Tensor) -> tn.Tensor:
        return tn.mean(tn.square(tn.relu(x.dot(self.up, d)).dot(self.down, f)))


class Training:
    """The model under one layout, with its optimizer.

    Args:
        mesh: The mesh.
        told: What `explain` says of it.
    """

    def __init__(self, mesh: Mesh, told: tn.Explanation) -> None:
        self.mesh, self.told = mesh, told
        with tn.use(mesh, told.layout):
            self.model = Wide().init(seed=0)
            self.x = tn.from_torch(NUMBERS, (batch, d))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)

    def step(self) -> float:
        """Seconds until the last rank has done a step, from when all begin it."""
        self.optimizer.zero_grad()
        dist.barrier()
        begin = time.perf_counter()
        with tn.use(self.mesh, self.told.layout):
            self.model(self.x).backward()
        self.optimizer.step()
        seconds = torch.tensor(time.perf_counter() - begin, dtype=torch.float64)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        return seconds.item()

    def predicted(self, rates: Rates) -> dict[str, float]:
        """Milliseconds of a step by what takes them."""
        told = self.told
        written_bytes = told.written_bytes + told.gradient_bytes + told.state_bytes
        products_s, written_s = told.flops / rates.flops_per_s, written_bytes / rates.written_bytes_per_s
        exchanges_s = told.seconds(rates) - products_s - written_s
        return {"products": 1e3 * products_s, "memory": 1e3 * written_s, "exchanges": 1e3 * exchanges_s}


def wide(rounds: int) -> list[dict[str, object]]:
    """A training step split by the batch and as the search has found, in turn, measured and predicted.

    What ranks give is measured again before each round, as a machine's speed drifts; medians predict.
    """
    mesh = tulle.init(ranks=-1)
    sample = tn.from_torch(NUMBERS, (batch, d))
    found = tn.best_layout(Wide(), sample, mesh, best=1)
    told = [found[0], tn.explain(Wide(), sample, mesh, "batch:ranks")]
    trainings = [Training(mesh, one) for one in told]
    times: list[list[float]] = [[], []]
    probed: list[tuple[float, float]] = []
    for number in range(rounds + 1):
        probed.append(speeds(mesh, (batch.size, d.size, f.size // mesh.size)))
        for training, several in zip(trainings, times, strict=True):
            seconds = [training.step() for _ in range(3)]
            if number:  # the first round allocates
                several.extend(seconds[1:])
    found_s, plain_s = map(median, times)
    flops, written = (median(several) for several in zip(*probed, strict=True))
    rates = replace(found.rates, flops_per_s=flops, written_bytes_per_s=written)
    parts = [training.predicted(rates) for training in trainings]
    found_ms, plain_ms = (math.fsum(one.values()) for one in parts)
    return [
        {
            "layout": str(told[0].layout),
            "ms": 1e3 * found_s,
            "predicted_ms": found_ms,
            "data_parallel_ms": 1e3 * plain_s,
            "predicted_data_parallel_ms": plain_ms,
            "factor": plain_s / found_s,
            "predicted_factor": plain_ms / found_ms,
            "predicted_parts_ms": dict(zip(("found", "data parallel"), parts, strict=True)),
            "steps_s": dict(zip(("found", "data parallel"), times, strict=True)),
            "rates": asdict(rates),
            "probed_per_s": probed,
        }
    ]
