"""The common job under `tulle.distribute`, with what the way's name ends in: `tulle-auto`, `tulle-rows-lookahead`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

import job
import torch
from torch import Tensor, nn

import tulle
from tulle.comm import barrier, traffic
from tulle.engine import ENGINE, DataParallel

LOOKAHEAD = "-lookahead"


def main() -> None:
    """Measure every workload that was asked for."""
    session = job.Session.from_arguments()
    scheme = session.way.removeprefix("tulle-")
    looks_ahead = scheme.endswith(LOOKAHEAD)
    mesh = tulle.init(data=-1)
    for request in session.requests:
        session.begin()
        model = job.build_model(request.workload, sparse=True)
        optimizer = job.make_optimizer(model)
        local = session.time(request, job.training_step(model, optimizer), lambda: barrier(mesh["data"]))
        model, optimizer = tulle.distribute(model, optimizer, mesh, plan=scheme.removesuffix(LOOKAHEAD))
        step = _CountingStep(job.training_step(model, optimizer), model)
        if looks_ahead:
            step.batches = iter(tulle.lookahead(_batches(request, mesh.rank)))
        whole = session.time(request, step, lambda: barrier(mesh["data"]))
        more = {"payload_bytes_per_step": median(step.sent_bytes[request.warmup :]), "schemes": _schemes(model)}
        session.write(
            request, local, whole, versions={"tulle": tulle.__version__, "torch": torch.__version__}, more=more
        )
        del model, optimizer, step


def _batches(request: job.Request, rank: int) -> Iterator[Sequence[Tensor]]:
    for number in range(request.warmup + request.steps):
        yield request.workload.ids(rank, number)


class _CountingStep:
    """A step to the end of all exchanges that it began, and the payload bytes that tulle counted in each."""

    def __init__(self, step: job.Step, model: nn.Module) -> None:
        self.step = step
        self.sent_bytes: list[int] = []
        self.batches: Iterator[Sequence[Tensor]] | None = None
        """Where the ids come from, in place of the caller's, which are the same."""
        self._split_tables = vars(model)[ENGINE].split_tables

    def __call__(self, ids: Sequence[Tensor]) -> None:
        before = traffic.total.bytes_sent
        self.step(ids if self.batches is None else next(self.batches))
        if self._split_tables is not None:
            self._split_tables.wait()  # rows of the next step are on the way: their time belongs to this one
        self.sent_bytes.append(traffic.total.bytes_sent - before)


def _schemes(model: nn.Module) -> dict[str, str]:
    engine = vars(model)[ENGINE]
    assert isinstance(engine, DataParallel)
    return {name: choice.scheme for name, choice in engine.ledger.choices.items()}


if __name__ == "__main__":
    main()
