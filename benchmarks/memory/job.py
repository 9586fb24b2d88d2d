"""One rank of the memory benchmark: a model, one way of saving memory, its estimate, and what was handed out."""

from __future__ import annotations

import os
import time
from pathlib import Path
from statistics import median
from typing import TypedDict

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import AdamW, Optimizer

import tulle
from tulle import memory, tensor_parallel
from tulle.engine import DataParallel, TableSettings
from tulle.memory.estimate import tensor_bytes
from tulle.mesh import Mesh

WORDS, WIDTH, HEADS, LAYERS, LENGTH, SAMPLES = 8_192, 256, 8, 8, 128, 4
"""Of a rank's batch: as many samples as these, whatever the number of ranks."""
STEPS = 5
WAYS = ("nothing", "shard_optimizer", "full_shard", "precision", "recompute", "tensor_parallel", "everything")


class Language(nn.Module):
    """A language model with a tied table."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, 0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.out = nn.Linear(WIDTH, WORDS, bias=False)
        self.out.weight = self.words.weight

    def forward(self, words: Tensor) -> Tensor:
        """Mean loss of predicting each next word of `[samples, length + 1]`."""
        scores = self.out(self.encoder(self.words(words[:, :-1])))
        return functional.cross_entropy(scores.flatten(0, 1).float(), words[:, 1:].flatten())


class Row(TypedDict):
    """What one way takes of one rank."""

    way: str
    ranks: int
    estimate_bytes: int
    measured_bytes: int
    step_s: float
    loss: float


def run(rank: int, ranks: int, way: str, folder: str) -> None:
    """Train some steps, and have rank 0 write what they took."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    split = 2 if way in ("tensor_parallel", "everything") and ranks > 1 else 1
    mesh = tulle.init(data=-1, model=split)
    torch.manual_seed(0)
    model = Language()
    options = options_of(way)
    if split > 1:
        tensor_parallel.apply(model, mesh["model"], smallest_bytes=0)
    words = torch.randint(WORDS, (SAMPLES, LENGTH + 1), generator=torch.Generator().manual_seed(mesh["data"].rank))
    optimizer = AdamW(model.parameters(), lr=1e-3)
    found = memory.estimate(model, optimizer, words, ranks=mesh["data"].size, options=options)
    model, optimizer = prepare(model, optimizer, options, mesh)

    def step() -> float:
        loss = model(words)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    step()  # lays out buckets, makes states
    state = [entry for entries in optimizer.state.values() for entry in entries.values()]
    masters = [p for p in optimizer.state if options.narrow is not None]
    local = [getattr(tensor, "_local_tensor", tensor) for tensor in (*model.parameters(), *state, *masters)]
    measured = tensor_bytes(local) + memory.measure_peak_bytes(step, mesh.device)
    times, loss = [], 0.0
    for _ in range(STEPS):
        begin_s = time.perf_counter()
        loss = step()
        times.append(time.perf_counter() - begin_s)
    if rank == 0:
        row = Row(
            way=way,
            ranks=ranks,
            estimate_bytes=found.peak_bytes,
            measured_bytes=measured,
            step_s=median(times),
            loss=loss,
        )
        torch.save(row, Path(folder) / "row.pt")
    torch.distributed.barrier()


def options_of(way: str) -> memory.Memory:
    """What a way stands for."""
    everything = way == "everything"
    return memory.Memory(
        shard_optimizer=way in ("shard_optimizer", "precision") or everything,
        full_shard=way == "full_shard",
        precision="bf16" if way == "precision" else None,
        recompute=tuple(f"encoder.layers.{n}" for n in range(LAYERS)) if way == "recompute" or everything else (),
    )


def prepare(model: nn.Module, optimizer: Optimizer, options: memory.Memory, mesh: Mesh) -> tuple[nn.Module, Optimizer]:
    """Put the options and data parallelism on a model."""
    memory.recompute(model, options.recompute)
    if options.full_shard:
        memory.shard_fully(model, mesh)
        return model, AdamW(model.parameters(), lr=1e-3)
    data = mesh["data"]
    DataParallel(model, data, tables=[], settings=TableSettings(), bucket_bytes=25 * 2**20, check_finite=False)
    if options.shard_optimizer:
        memory.shard_optimizer(optimizer, data, narrow=options.narrow)
    return model, optimizer
