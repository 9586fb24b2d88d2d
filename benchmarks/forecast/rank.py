"""One rank: profiles a job among all ranks, forecasts plans from that, and times them.

    profile of the job ──▶ planner, rivals ──▶ for each plan: forecast, and seconds of real steps

Rank 0 writes `JOB.json` into the folder. A round times every plan once, and rounds take turns, so that what disturbs
the machine for a while disturbs all plans alike. One or two rounds of all plans do not tell apart those that take
nearly as long: the fastest then take more turns, with the planner's.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import layouts
import torch
from agenda import PLAIN_STEPS, PLAIN_WARMUP, WARMUP, in_turn, worth_a_race
from jobs import JOBS, NAMED, Job
from plans import rivals
from torch import Tensor, nn
from torch.optim import Optimizer

import tulle
from tables import PLANNER
from tulle.comm import barrier, gather_values
from tulle.errors import TulleError
from tulle.memory import measure_peak_bytes
from tulle.mesh import Axis, Mesh
from tulle.plan import Plan
from tulle.plan.footprint import footprints
from tulle.plan.lower import lower
from tulle.plan.search import best_plan
from tulle.plan.space import Space
from tulle.simulate import run
from tulle.workload import Profile

SAMPLES = 3
"""Batches that a profile sees."""
_LABEL = "the forecast"


@dataclass
class Contender:
    """A plan, what it was predicted to take, and what it took."""

    name: str
    plan: Plan
    predicted_s: float
    parts_s: Mapping[str, float]
    predicted_bytes: int
    measured_s: list[float] = field(default_factory=list)
    final_s: list[float] = field(default_factory=list)
    """Of turns among the finalists: the n-th of all were taken right after each other."""
    plain_s: list[float] = field(default_factory=list)
    """Seconds of the same step without communication, on all ranks, right before: how fast the machine is then."""
    measured_bytes: int = 0
    refusal: str = ""

    def as_json(self) -> dict[str, Any]:
        """For the result."""
        kept = (
            "name",
            "predicted_s",
            "parts_s",
            "predicted_bytes",
            "measured_s",
            "final_s",
            "plain_s",
            "measured_bytes",
            "refusal",
        )
        return {name: getattr(self, name) for name in kept} | {"plan": self.plan.to_json()}


def main() -> None:
    """Do what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", nargs="+", required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--plans", type=int, required=True, help="beside the planner's own")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--finals", type=int, required=True, help="turns of the finalists")
    options = parser.parse_args()
    torch.set_num_threads(1)
    mesh = tulle.init(data=-1)
    axis = mesh["data"]
    for name in options.jobs:
        result = layouts.forecast(mesh, options) if name == NAMED else compare(JOBS[name](axis.size), mesh, options)
        if axis.rank == 0:
            (options.output / f"{name}.json").write_text(json.dumps(result) + "\n")


def compare(job: Job, mesh: Mesh, options: argparse.Namespace) -> dict[str, Any]:
    """Predicted and measured steps of a job's plans."""
    axis = mesh["data"]
    begin_s = time.perf_counter()
    profile = profiled(job, mesh)
    profiled_s = time.perf_counter() - begin_s
    contenders = forecast(job, profile, axis, options.plans)
    plain = Plain.of(job, axis)
    for _ in range(options.rounds):
        for contender in contenders:
            if not contender.refusal:
                contender.plain_s.append(plain.seconds())
                spent_s = measure(job, contender, mesh, options.steps)
                contender.measured_s += [] if spent_s is None else [spent_s]
    if options.finals:
        race(job, finalists(contenders), mesh, options.finals, options.steps)
    return {"profile_s": profiled_s, "step_s": profile.step_s, "plans": [one.as_json() for one in contenders]}


@dataclass
class Plain:
    """A model that each rank trains for itself: tells how fast the machine is just now."""

    step: Callable[[object], None]
    batches: Sequence[object]
    axis: Axis

    @staticmethod
    def of(job: Job, axis: Axis) -> Plain:
        model, optimizers = job.make()
        batches = [job.batch(axis.rank, step) for step in range(SAMPLES)]
        return Plain(stepping(job, model, optimizers, Plan({})), batches, axis)

    def seconds(self) -> float:
        """Of one step; of the slowest rank in each."""
        spent: list[list[float]] = []
        for number in range(PLAIN_WARMUP + PLAIN_STEPS):
            barrier(self.axis)
            begin_s = time.perf_counter()
            self.step(self.batches[number % len(self.batches)])
            spent.append(gather_values(time.perf_counter() - begin_s, self.axis, label=_LABEL))
        return sum(map(max, spent[PLAIN_WARMUP:])) / PLAIN_STEPS


def profiled(job: Job, mesh: Mesh) -> Profile:
    """What the job does, with each rank on its own batches."""
    torch.manual_seed(0)
    model, optimizers = job.make()
    batches = [job.batch(mesh.rank, step) for step in range(SAMPLES)]
    return tulle.profile(model, optimizers, batches[0], mesh, further=batches[1:], loss=job.loss)


def forecast(job: Job, profile: Profile, axis: Axis, count: int) -> list[Contender]:
    """The planner's choice and its rivals, and what the simulator says of each; as rank 0 sees it."""
    contenders: list[Contender] = []
    if axis.rank == 0:
        space = Space(mesh={"model": 1} if job.joins else {"model": 1, "pipe": 1})
        batch = profile.batch * axis.size
        begin_s = time.perf_counter()
        chosen = best_plan(profile, profile.cluster, batch=batch, space=space, lookahead=True)
        print(f"planned in {time.perf_counter() - begin_s:.2f} s", flush=True)
        for name, plan in {PLANNER: chosen, **rivals(profile, axis.size, count, pipes=job.joins)}.items():
            seen = run(lower(plan, profile, profile.cluster, batch=batch, lookahead=True))
            peaks = footprints(plan, profile, profile.cluster, batch=batch)
            contenders.append(
                Contender(name, plan, seen.step_s, dict(seen.by_kind), max(one.peak_bytes for one in peaks))
            )
    return gather_values(contenders, axis, label=_LABEL)[0]


def measure(job: Job, contender: Contender, whole: Mesh, steps: int) -> float | None:
    """Seconds of a step under a plan, of a model made for it; and count the memory of one. None if it is refused."""
    axis = whole["data"]
    mesh = (
        whole if contender.plan.mesh == whole.shape else tulle.init(timeout=None, backend=None, **contender.plan.mesh)
    )
    torch.manual_seed(0)
    model, optimizers = job.make()
    try:
        model, optimizers = tulle.distribute(model, optimizers, mesh, plan=contender.plan)
    except TulleError as refusal:  # the same on all ranks
        contender.refusal = str(refusal)
        return None
    step = stepping(job, model, optimizers, contender.plan)
    batches = [replica_batch(job, mesh, number) for number in range(WARMUP + steps + 1)]
    spent_s = max(gather_values(seconds(step, batches, axis), axis, label=_LABEL))
    if (
        not contender.measured_bytes and "pipe" not in mesh
    ):  # whose work is done in threads that torch's profiler does not see
        peak_bytes = held_bytes(model, optimizers)
        # Of a batch that the profile has seen: sentences differ in length.
        peak_bytes += measure_peak_bytes(lambda: to_the_end(step, batches[0], model), mesh.device)
        contender.measured_bytes = max(gather_values(peak_bytes, axis, label=_LABEL))
    barrier(axis)
    gc.collect()
    return spent_s


def finalists(contenders: Sequence[Contender]) -> list[Contender]:
    """The planner's plan and the fastest other ones; alike on all ranks, as all heard all times."""
    own = contenders[0]
    assert own.name == PLANNER, "it is the first"
    if not own.measured_s:
        return []
    others = [one for one in contenders if one.measured_s and one.plan.diff(own.plan)]
    names = worth_a_race({one.name: median(one.measured_s) for one in others}, median(own.measured_s))
    return [own, *(one for one in others if one.name in names)]


def race(job: Job, racers: Sequence[Contender], mesh: Mesh, turns: int, steps: int) -> None:
    """Time some plans in turn."""
    for one in in_turn(racers, turns if len(racers) > 1 else 0):
        spent_s = measure(job, one, mesh, steps)
        assert spent_s is not None, "it has been timed before"
        one.final_s.append(spent_s)


def to_the_end(step: Callable[[object], None], batch: object, model: nn.Module) -> None:
    """A step after which nothing is on the way, as who reads all parameters has it.

    A collective notes its end with the profiler that saw it begin: one that is still running when that profiler has
    ended writes to memory that is no longer its own.
    """
    step(batch)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.detach().flatten()[:1].sum()


def seconds(step: Callable[[object], None], batches: Sequence[object], axis: Axis) -> float:
    """Seconds of one of this rank's steps, which nobody stops between; the first ones and the last are left out."""
    begin_s = spent_s = 0.0
    for number, batch in enumerate(tulle.lookahead(batches)):
        if number == WARMUP:
            barrier(axis)
            begin_s = time.perf_counter()
        step(batch)
        if number == len(batches) - 2:
            spent_s = time.perf_counter() - begin_s
    return spent_s / (len(batches) - 1 - WARMUP)


def stepping(job: Job, model: nn.Module, optimizers: Sequence[Optimizer], plan: Plan) -> Callable[[object], None]:
    """One whole step, as a user writes it."""

    def loss_of(model: nn.Module, batch: Any) -> Tensor:
        called = model(**batch) if isinstance(batch, Mapping) else model(*batch)
        loss = job.loss(called)
        loss.backward()
        return loss

    through = tulle.step(micro_batches=plan.micro_batches)(loss_of) if "pipe" in plan.mesh else loss_of

    def step(batch: object) -> None:
        through(model, batch)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    return step


def replica_batch(job: Job, mesh: Mesh, step: int) -> object:
    """What this rank's replica is given in a step: the batches of all its ranks."""
    if "pipe" not in mesh:
        return job.batch(mesh.rank, step)
    pipe = mesh["pipe"].size
    replica = mesh["data"].rank if "data" in mesh else 0
    return job.join([job.batch(replica * pipe + rank, step) for rank in range(pipe)])


def held_bytes(model: nn.Module, optimizers: Sequence[Optimizer]) -> int:
    """Parameters, buffers, gradients and optimizer state between steps."""
    tensors = [*model.parameters(), *model.buffers()]
    tensors += [p.grad for p in model.parameters() if p.grad is not None and not p.grad.is_sparse]
    for optimizer in optimizers:
        tensors += [one for state in optimizer.state.values() for one in state.values() if isinstance(one, Tensor)]
    storages = {one.untyped_storage()._cdata: one.untyped_storage().nbytes() for one in tensors if not one.is_meta}
    return sum(storages.values())


if __name__ == "__main__":
    main()
