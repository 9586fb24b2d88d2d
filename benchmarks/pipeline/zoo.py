"""Trains every model of the zoo as a pipeline and holds loss and gradients against one process; a line of JSON a model.

torchrun --nproc-per-node 4 benchmarks/pipeline/zoo.py --out benchmarks/pipeline/results/zoo-4.json
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import warnings
from pathlib import Path

import torch
from torch import Tensor, nn

import tulle
from models import ZOO, Entry, first_tensor
from tulle import pipeline
from tulle.comm import gather_values
from tulle.pipeline.randomness import seed_all, seed_of

MICRO_BATCHES = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=list(ZOO))
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    mesh = tulle.init(pipe=-1, timeout=60)
    rows = []
    for name in options.models:
        rows.append({"model": name, "ranks": mesh.size, "tracer": ZOO[name].tracer, **check(ZOO[name], mesh, options)})
        if mesh.rank == 0:
            print(json.dumps(rows[-1]), flush=True)
    if options.out and mesh.rank == 0:
        options.out.parent.mkdir(exist_ok=True)
        options.out.write_text(json.dumps(rows, indent=1))


def check(entry: Entry, mesh: tulle.Mesh, options: argparse.Namespace) -> dict[str, object]:
    """One step with 4 micro-batches both ways: how loss and gradients differ."""
    torch.set_default_dtype(torch.float32 if entry.is_single else torch.float64)
    seed_all(0)
    model = entry.build().train()
    reference = copy.deepcopy(model)
    batch = entry.inputs(2 * MICRO_BATCHES)
    seed_all(1)
    pipeline.place(model, mesh["pipe"], sample={name: tensor[:2] for name, tensor in batch.items()})
    placed = pipeline.placement_of(model)
    assert placed is not None, "it was just placed"
    step = pipeline.step(micro_batches=MICRO_BATCHES, schedule=options.schedule)(train)
    first = placed.runtime.programs + 1
    losses = step(model, batch).stack().tolist()
    expected = []
    for number in range(MICRO_BATCHES):
        seed_all(seed_of(placed.runtime.seed, first + number))
        part = {name: tensor[2 * number : 2 * number + 2] for name, tensor in batch.items()}
        loss = first_tensor(reference(**part)).pow(2).mean()
        (loss / MICRO_BATCHES).backward()
        expected.append(loss.item())
    worst = max(gather_values(worst_gradient(model, reference), mesh["pipe"], label="the comparison"))
    units = [list(placed.stages.values()).count(stage) for stage in range(mesh.size)]
    return {
        "dtype": str(torch.get_default_dtype()),
        "is_loss_equal": losses == expected,
        "worst_gradient": worst,
        "modules": units,
    }


def train(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    loss = first_tensor(model(**batch)).pow(2).mean()
    loss.backward()
    return loss


def worst_gradient(model: nn.Module, reference: nn.Module) -> float:
    """The largest difference, relative to the largest entry of any gradient; infinite if one is there and one not."""
    expected = dict(reference.named_parameters())
    scale = max(p.grad.abs().max().item() for p in expected.values() if p.grad is not None and p.numel())
    worst = 0.0
    for name, parameter in model.named_parameters():
        ours, theirs = parameter.grad, expected[name].grad
        if parameter.is_meta:
            worst = worst if ours is None else float("inf")
        elif (ours is None) != (theirs is None):
            return float("inf")
        elif ours is not None and theirs is not None and ours.numel():
            worst = max(worst, (ours - theirs).abs().max().item() / scale)
    return worst


if __name__ == "__main__":
    main()
