"""What all workers have in common: the session of one rank, and the check against one process."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import job
import numpy
import torch
from torch import Tensor

CHECK_STEPS = 3
CHECK_RANKS = 16
CHECK_LEARNING_RATE = 100.0  # the job's gradients are tiny: at its own rate, a trainer that stands still would pass
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Trainer:
    """A job that is set up: one call trains one step of this rank.

    Args:
        step: The whole step on this rank's ids.
        parameters: The tables in the job's order, each whole, then the head's weight and bias. Every rank must call it.
    """

    step: job.Step
    parameters: Callable[[], list[Tensor]]


@dataclass(frozen=True)
class Way:
    """How one way sets a job up, and whether its one-process step has sparse gradients."""

    make: Callable[[job.Workload], Trainer]
    sparse: bool


def serve(ways: Mapping[str, Way], *, barrier: Callable[[], object], versions: Mapping[str, str]) -> None:
    """Do what the command line asks of this rank: a session of measurements or, with `--check`, the check."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--way", choices=ways, required=True)
    parser.add_argument("--check", action="store_true")
    options, _ = parser.parse_known_args()
    way = ways[options.way]
    if options.check:
        check(options.way, way)
        return
    session = job.Session.from_arguments()
    for request in session.requests:
        session.begin()
        local = session.time(request, _local_step(request.workload, way), barrier)
        # What the local step held is gone by now, and its peak is forgotten.
        session.begin()
        trainer = way.make(request.workload)
        whole = session.time(request, trainer.step, barrier)
        session.write(request, local, whole, versions={"torch": torch.__version__, **versions})
        del trainer


def reference(workload: job.Workload, ranks: int, steps: int) -> list[Tensor]:
    """The parameters after some steps of one process on the mean of the ranks' losses."""
    model = job.build_model(workload, sparse=False)
    optimizer = job.make_optimizer(model)
    for number in range(steps):
        optimizer.zero_grad()
        for rank in range(ranks):
            (model(workload.ids(rank, number)) / ranks).backward()
        optimizer.step()
    return list(model.parameters())


def check(name: str, way: Way) -> None:
    """Train a tiny job and compare every parameter with one process that trains on all ranks' ids; print OK."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    workload = tiny_workload()
    job.LEARNING_RATE = CHECK_LEARNING_RATE
    before = list(job.build_model(workload, sparse=False).parameters())
    expected = reference(workload, ranks, CHECK_STEPS)
    trainer = way.make(workload)
    for number in range(CHECK_STEPS):
        trainer.step(workload.ids(rank, number))
    for index, (ours, theirs, start) in enumerate(zip(trainer.parameters(), expected, before, strict=True)):
        off = (ours - theirs).abs().max().item()
        moved = (start - theirs).abs().max().item()
        if not off <= min(TOLERANCE, 1e-2 * moved):
            raise SystemExit(f"{name}: parameter {index} is off by {off:.3g} on rank {rank}, having moved {moved:.3g}")
    print(f"OK {name}: rank {rank} of {ranks}", flush=True)


def tiny_workload() -> job.Workload:
    """Two tables and ids with repeats, other ones on each rank."""
    generator = numpy.random.default_rng(0)
    tables = (job.TableShape("words", 50, 8), job.TableShape("users", 20, 8))
    drawn = tuple(
        generator.integers(0, table.num_rows, (CHECK_RANKS, CHECK_STEPS, tokens), dtype=numpy.int32)
        for table, tokens in zip(tables, (30, 7), strict=True)
    )
    return job.Workload("check", tables, drawn)


def _local_step(workload: job.Workload, way: Way) -> job.Step:
    model = job.build_model(workload, sparse=way.sparse)
    return job.training_step(model, job.make_optimizer(model))
