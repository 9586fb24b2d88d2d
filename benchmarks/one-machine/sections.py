"""What trains a model in one way, on one of several ranks of this machine.

replicas          `tulle.distribute` beside DistributedDataParallel
full sharding     beside `fully_shard` of repeated layers and the rest
split layers      over axis `model`, beside one process, on batches of `LARGE` times the size
stages            over axis `pipe`, cut by a profile, beside the same
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from many import MODELS, Job
from spawned import in_turns, write_row
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map

import tulle
from tulle.memory.recompute import repeated

DDP, FULLY_SHARD, ONE = "DDP", "fully_shard", "one process"
REPLICAS, FULL_SHARD, SPLIT_LAYERS, STAGES = "tulle", "full_shard", "model=2", "pipe=2"
SECTIONS = {
    "replicas": (DDP, REPLICAS),
    "full sharding": (FULLY_SHARD, FULL_SHARD),
    "split layers": (ONE, SPLIT_LAYERS),
    "stages": (ONE, STAGES),
}
"""What stands beside what."""
LARGE = 4
TURN_S, WARM_STEPS, WARM_TURNS = 0.4, 20, 1
"""About how long a turn takes; steps of each way before the first, in which schemes may be chosen anew."""


def run(rank: int, ranks: int, section: str, name: str, turns: int, folder: str) -> None:
    """Train by both ways in turn; rank 0 writes seconds a step by turn, or what was raised."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    row: dict[str, object] = {"section": section, "model": name}
    try:
        row |= _timed(section, name, rank, turns)
    except Exception as error:  # a row of the table, too
        row["error"] = f"{type(error).__name__}: {str(error)[:200]}"
    write_row(folder, rank, row)


def _timed(section: str, name: str, rank: int, turns: int) -> dict[str, list[float]]:
    steps = {way: stepper(way, name, rank) for way in SECTIONS[section]}
    for step in steps.values():
        for _ in range(WARM_STEPS):
            step()
    begin_s = time.perf_counter()
    steps[SECTIONS[section][0]]()
    taken_s = torch.tensor(time.perf_counter() - begin_s)
    dist.broadcast(taken_s, 0)
    return in_turns(steps, turns, warm=WARM_TURNS, count=max(2, min(50, int(TURN_S / taken_s.item()))))


def stepper(way: str, name: str, rank: int) -> Callable[[], object]:
    """What trains a model for a step in one way."""
    torch.manual_seed(0)
    job = MODELS[name]()
    batch = _large(job) if way in (ONE, SPLIT_LAYERS, STAGES) else job.batch(rank)
    model = job.model
    if way == DDP:
        model = DistributedDataParallel(model, find_unused_parameters=_has_idle(job, batch))
    elif way == FULLY_SHARD:
        _shard_fully(model)
    optimizer = job.optimizer()
    if way == REPLICAS:
        tulle.distribute(model, optimizer, tulle.init(data=-1))
    elif way == FULL_SHARD:
        mesh = tulle.init(data=-1)
        tulle.distribute(model, optimizer, mesh, plan=tulle.Plan(mesh.shape, memory=tulle.Memory(full_shard=True)))
    elif way == SPLIT_LAYERS:
        tulle.distribute(model, optimizer, tulle.init(data=1, model=-1))
    elif way == STAGES:
        tulle.distribute(model, optimizer, tulle.init(data=1, pipe=-1), sample=batch, plan="anew")

    def train(batch: Any) -> None:
        job.loss(model, batch).backward()

    if way == STAGES:
        train = tulle.step(train)

    def step() -> None:
        train(batch)
        optimizer.step()
        optimizer.zero_grad()

    return step


def _large(job: Job) -> Any:
    """A batch as large as several."""
    return tree_map(lambda *parts: torch.cat(parts), *(job.batch(number) for number in range(LARGE)))


def _has_idle(job: Job, batch: Any) -> bool:
    """Whether a backward leaves a parameter without a gradient on some rank, of which DDP must be told."""
    job.loss(job.model, batch).backward()
    idle = torch.tensor(float(any(one.requires_grad and one.grad is None for one in job.model.parameters())))
    dist.all_reduce(idle)
    job.model.zero_grad()
    return bool(idle)


def _shard_fully(model: nn.Module) -> None:
    """`fully_shard` as its tutorial has it: each of the layers that repeat, and the rest."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in [model.get_submodule(name) for name in repeated(model)]:
        if type(layer).forward is not nn.Module.forward:  # a list of layers can be no unit
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
