"""One rank of `test_emulated_cuda`: trains on the emulated device and writes what it saw to standard output as JSON."""

import emulated_cuda as emulated  # isort: skip  before torch

import copy
import json
import math
import os
import sys
import threading
from collections import Counter
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn

import tulle
from models import batches, momentum
from tulle.engine import returned, split_tables


class Bags(nn.Module):
    """Two sparse tables of which ids of one are made in forward, and layers."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(40, 6, sparse=True)
        self.tags = nn.EmbeddingBag(30, 6, sparse=True, mode="sum")
        self.layers = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Mean loss of `[samples, length]`."""
        return self.layers(self.words(ids).mean(1) + self.tags(ids % 30)).pow(2).mean()


def checks(mesh: tulle.Mesh) -> dict[str, object]:
    """What the emulation refuses and finds, so that a silent one is not taken for a right one."""
    refused, here = [], torch.ones(3, device=mesh.device)
    for wrong in (
        lambda: here + torch.ones(3),
        lambda: torch.eye(2, dtype=torch.long, device=mesh.device) @ torch.eye(2, dtype=torch.long, device=mesh.device),
        lambda: dist.all_reduce(here.to(torch.int16)),
        lambda: dist.all_reduce(torch.ones(4, 4, device=mesh.device).T),
        lambda: dist.all_reduce(torch.ones(3)),
    ):
        try:
            wrong()
        except (RuntimeError, ValueError) as error:
            refused.append(str(error).split()[0])
    stream, main = torch.cuda.Stream(), torch.cuda.current_stream()
    stream.wait_stream(main)
    with torch.cuda.stream(stream):
        there = here * 2
    _ = there + 1  # does not wait
    main.wait_stream(stream)
    _ = there + 1  # has waited
    there.record_stream(main)
    read = torch.ones(3, device=mesh.device)
    stream.wait_stream(main)
    with torch.cuda.stream(stream):
        _ = read + 1
    del read  # given back while the other stream reads it
    threads: list[int] = []
    leaf = torch.ones(2, device=mesh.device, requires_grad=True)
    leaf.register_hook(lambda _: threads.append(threading.get_ident()))
    leaf.sum().backward()
    races = [race.split()[0] for race in emulated.races]
    emulated.races.clear()
    return {"refused": refused, "races": races, "own thread": threads[0] != threading.get_ident()}


def train(mesh: tulle.Mesh, plan: tulle.Plan | str, *, is_ahead: bool = False) -> dict[str, object]:
    """Steps beside those of the CPU: the difference, and what the host waited for in the last but one.

    That is the seventh: after some earlier ones, ever more seldom, replicas are compared (`tulle.engine.alike`).
    """
    torch.manual_seed(0)
    reference = Bags().double()
    model = copy.deepcopy(reference).to(mesh.device)
    model, [optimizer] = tulle.distribute(model, momentum(model), mesh, plan=plan)
    [theirs], steps = momentum(reference), batches(8, 4 * mesh.size)
    loader = (ids.chunk(mesh.size)[mesh.rank].to(mesh.device) for ids in steps)
    waits: list[Counter[str]] = []
    losses = []
    for ids, whole in zip(tulle.lookahead(loader) if is_ahead else loader, steps, strict=True):
        emulated.syncs.clear()
        loss, expected = model(ids), reference(whole)
        loss.backward()
        expected.backward()
        for one in (optimizer, theirs):
            one.step()
            one.zero_grad()
        where = ("beside" if own else "in front" for kind, line, own in emulated.syncs if line != "elsewhere")
        waits.append(Counter(where))
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(abs(total.item() / mesh.size - expected.item()))
    return {"difference": max(losses), "waits": dict(waits[-2])}


def delayed(mesh: tulle.Mesh) -> tulle.Plan:
    """A plan in which rows that the next batch does not want go later, and wait for nobody."""
    split_tables.WORTH_S = 0.0  # small tables never pay
    returned._LONGEST_WAIT_S = math.inf  # to wait so long raises
    model = Bags().to(mesh.device)
    plan = tulle.plan(model, momentum(model), mesh)
    tables = {"words.weight": (40, 6), "tags.weight": (30, 6)}
    return replace(plan.with_rows_split(tables, "a test"), schedule="read")


def save_memory(mesh: tulle.Mesh) -> float:
    """With full sharding, recomputation, offload, mixed precision, a scaler and clipping: the last loss."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)]).to(mesh.device)
    memory = tulle.Memory(full_shard=True, recompute=("0", "1"), offload=("2",))
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = tulle.distribute(model, optimizer, mesh, plan=tulle.Plan(mesh.shape, memory=memory))
    scaler = torch.amp.GradScaler("cuda")
    for _ in range(3):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(torch.ones(2, 8, device=mesh.device)).float().pow(2).mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        tulle.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return loss.item()


if __name__ == "__main__":
    emulated.install(int(os.environ["WORLD_SIZE"]))
    mesh = tulle.init(data=-1)
    told: dict[str, object] = {"device": str(mesh.device), "backend": dist.get_backend(), "checks": checks(mesh)}
    told["replicas"] = train(mesh, "balanced")
    told["rows"] = train(mesh, "rows", is_ahead=True)
    told["columns"] = train(mesh, "columns")
    told["late"] = train(mesh, tulle.Plan(mesh.shape, schedule="read"))
    told["delayed"] = train(mesh, delayed(mesh), is_ahead=True)
    told["memory"] = save_memory(mesh)
    told["races"], told["calls"], told["order"] = emulated.races, emulated.calls, emulated.order
    print(json.dumps(told))
    sys.stdout.flush()
    dist.barrier()
    os._exit(0)
