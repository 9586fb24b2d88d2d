"""The common job under `tulle.distribute`, with the scheme that the way's name ends in: `tulle-auto`, `tulle-ring`."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import job
import torch
from torch import Tensor, nn

import tulle
from tulle.comm import barrier, traffic
from tulle.engine import ENGINE, DataParallel


def main() -> None:
    """Measure every workload that was asked for."""
    session = job.Session.from_arguments()
    scheme = session.way.removeprefix("tulle-")
    mesh = tulle.init(data=-1)
    for request in session.requests:
        session.begin()
        model = job.build_model(request.workload, sparse=True)
        optimizer = job.make_optimizer(model)
        local = session.time(request, job.training_step(model, optimizer), lambda: barrier(mesh["data"]))
        model, optimizer = tulle.distribute(model, optimizer, mesh, plan=scheme)
        step = _CountingStep(job.training_step(model, optimizer))
        whole = session.time(request, step, lambda: barrier(mesh["data"]))
        more = {"payload_bytes_per_step": median(step.sent_bytes[request.warmup :]), "schemes": _schemes(model)}
        session.write(
            request, local, whole, versions={"tulle": tulle.__version__, "torch": torch.__version__}, more=more
        )
        del model, optimizer, step


class _CountingStep:
    """A step, and the payload bytes that tulle counted in each."""

    def __init__(self, step: job.Step) -> None:
        self.step = step
        self.sent_bytes: list[int] = []

    def __call__(self, ids: Sequence[Tensor]) -> None:
        before = traffic.total.bytes_sent
        self.step(ids)
        self.sent_bytes.append(traffic.total.bytes_sent - before)


def _schemes(model: nn.Module) -> dict[str, str]:
    engine = vars(model)[ENGINE]
    assert isinstance(engine, DataParallel)
    return {name: choice.scheme for name, choice in engine.choices().items()}


if __name__ == "__main__":
    main()
