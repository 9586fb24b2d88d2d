"""Trains without a pause and takes the time: what the workers of all libraries have in common.

A worker is one program per library, started once per rank by the runner of `sparse-sync`, and is this, and no more:

    def make(workload: job.Workload) -> Course:
        model = DistributedDataParallel(networks.build_model(workload, sparse=True))
        return Course(course.training_step(model, networks.make_optimizer(model)))

    course.serve({"ddp-sparse": Way(make, sparse=True)}, barrier=dist.barrier, versions={})

Ranks meet at a barrier before the first step that is timed and after the last, and nowhere between: a library that
gets ahead of itself, or lets one rank run ahead of another, may. The time of a round is that of the slowest rank.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import job
import networks
import torch
from networks import Batch
from torch import Tensor, nn

LOCAL_STEPS = 4

Step = Callable[[Batch], Tensor]
"""One whole training step: forward, backward, communication, optimizer; gives this rank's loss."""


@dataclass(frozen=True)
class Course:
    """A training that is set up.

    Args:
        step: Trains on one batch.
        through: Goes through the batches, as the user's loop does: `tulle.lookahead`, say.
        finish: Returns when nothing is under way.
        more: Called after the time was taken: what only this library can tell.
    """

    step: Step
    through: Callable[[Iterable[Batch]], Iterable[Batch]] = iter
    finish: Callable[[], object] = lambda: None
    more: Callable[[], Mapping[str, object]] = dict


@dataclass(frozen=True)
class Way:
    """How one way sets a training up, and whether the tables of its plain model have sparse gradients."""

    make: Callable[[job.Workload], Course]
    sparse: bool


@dataclass
class Clock:
    """When the steps that are timed began and ended, and what the network card had sent by then."""

    barrier: Callable[[], object]
    times_s: list[float] = field(default_factory=list)
    sent: list[int | None] = field(default_factory=list)

    def start(self) -> None:
        """All ranks begin together."""
        self.barrier()
        self.sent.append(job.counter("tx_bytes"))
        self.times_s.append(time.perf_counter())

    def stop(self, steps: int) -> job.Timing:
        """This rank is at its end; what the others have yet to send counts as well."""
        self.times_s.append(time.perf_counter())
        self.barrier()
        self.sent.append(job.counter("tx_bytes"))
        before, after = self.sent
        sent_bytes = None if before is None or after is None else (after - before) / steps
        return job.Timing([(self.times_s[1] - self.times_s[0]) / steps], sent_bytes, None)


def serve(ways: Mapping[str, Way], *, barrier: Callable[[], object], versions: Mapping[str, str]) -> None:
    """Do what the command line asks of this rank."""
    session = job.Session.from_arguments()
    way = ways[session.way]
    for request in session.requests:
        session.begin()
        local = time_plain_model(session, request, barrier, sparse=way.sparse)
        session.begin()
        course = way.make(request.workload)
        whole, losses = train(session, request, course, barrier)
        more = {"losses": losses, "units_per_step": networks.units(request.workload) * session.size, **course.more()}
        session.write(request, local, whole, versions={"torch": torch.__version__, **versions}, more=more)
        del course


def train(
    session: job.Session, request: job.Request, course: Course, barrier: Callable[[], object]
) -> tuple[job.Timing, list[float]]:
    """Seconds of a step, and this rank's losses; every rank must call it."""
    steps = request.warmup + request.steps
    losses: list[Tensor] = []
    clock, timing = Clock(barrier), None
    # One batch more than are timed: what a look ahead does for it counts, as what was done for the first did not.
    for number, batch in enumerate(course.through(batches(request.workload, session.rank, steps + 1))):
        if number == request.warmup:
            clock.start()
        losses.append(course.step(batch))
        if number == steps - 1:
            losses[-1].item()
            course.finish()
            timing = clock.stop(request.steps)
    assert timing is not None, "there are steps to be timed"
    return timing, [loss.item() for loss in losses]


def time_plain_model(
    session: job.Session, request: job.Request, barrier: Callable[[], object], *, sparse: bool
) -> job.Timing:
    """Seconds of the same steps without communication, while all ranks take them: what computation costs here."""
    model = networks.build_model(request.workload, sparse=sparse)
    step = training_step(model, networks.make_optimizer(model))
    local = job.Request(request.workload, min(LOCAL_STEPS, request.steps), warmup=1)
    timing, _ = train(session, local, Course(step), barrier)
    return timing


def training_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    """The step that a user writes."""

    def step(batch: Batch) -> Tensor:
        loss = model(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def batches(workload: job.Workload, rank: int, count: int) -> Iterator[Batch]:
    """This rank's batches, one after another, all made beforehand: reading text is not what is compared."""
    yield from [networks.batch(workload, rank, number) for number in range(count)]
