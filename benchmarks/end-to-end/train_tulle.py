"""One rank under `tulle.distribute`, with the plan in the way's name: `tulle-auto`, `tulle-rows-lookahead`."""

# pyright: reportMissingImports=false
from __future__ import annotations

from dataclasses import replace
from functools import partial
from statistics import mean

import course
import job
import networks
from course import Course, Way
from networks import Batch
from torch import Tensor, nn

import tulle
from tulle.comm import barrier, traffic
from tulle.comm.traffic import under_way_and_waited_s
from tulle.engine import ENGINE, DataParallel

OURS = "tulle-"
LOOKAHEAD = "-lookahead"
SCHEDULED = "-scheduled"
AUTO = "tulle-auto"
DENSE = "tulle-dense"
ABOUT = {
    AUTO: "a plan chosen from a sample, and tulle.lookahead",
    DENSE: "replicas with dense gradients, all-reduced in buckets",
    "tulle-allgather": "replicas: every rank gets every rank's rows",
    "tulle-balanced": "replicas: rows are summed by owners that a hash deals them to",
    "tulle-rows": "tables split by rows; ids are told in forward",
    "tulle-rows-lookahead": "tables split by rows; ids are told a step ahead",
    "tulle-rows-lookahead-scheduled": "the same, dense parameters updated when the next forward reads them",
    "tulle-columns": "tables split by columns",
    "tulle-columns-lookahead": "tables split by columns; ids are told a step ahead",
}
"""The ways of tulle, in the order of the ablation: each adds to, or stands beside, the one above."""


def make(workload: job.Workload, mesh: tulle.Mesh, way: str) -> Course:
    """Distribute the model as a user would: `auto` with a sample and a look ahead, all else as its name says."""
    model = networks.build_model(workload, sparse=way != DENSE)
    optimizer = networks.make_optimizer(model)
    plan: tulle.Plan | str = "auto" if way in (AUTO, DENSE) else way.split("-")[1]
    if way.endswith(SCHEDULED):
        plan = scheduled(tulle.plan(model, optimizer, mesh), model)
    sample = networks.batch(workload, mesh.rank, 0) if way == AUTO else None
    model, optimizer = tulle.distribute(model, optimizer, mesh, plan=plan, sample=sample)
    looks_ahead = way == AUTO or LOOKAHEAD in way
    observed = Observed(course.training_step(model, optimizer), model)
    return Course(
        observed, through=tulle.lookahead if looks_ahead else iter, finish=observed.finish, more=observed.more
    )


def scheduled(plan: tulle.Plan, model: nn.Module) -> tulle.Plan:
    """Tables by rows, and everything else updated when it is read."""
    tables = {
        f"{name}.weight": (module.num_embeddings, module.embedding_dim)
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding)
    }
    return replace(plan.with_rows_split(tables, "given"), schedule="read")


class Observed:
    """A step, and what is seen of its communication from the third one on."""

    SETTLED = 3

    def __init__(self, step: course.Step, model: nn.Module) -> None:
        self._step = step
        self._steps = 0
        self._sent_bytes: list[int] = []
        engine = vars(model)[ENGINE]
        assert isinstance(engine, DataParallel)
        self._engine = engine
        self._model = model

    def __call__(self, batch: Batch) -> Tensor:
        if self._steps == self.SETTLED:
            traffic.is_tracing = True
            traffic.take_spans()
        self._steps += 1
        before = traffic.total.bytes_sent
        loss = self._step(batch)
        self._sent_bytes.append(traffic.total.bytes_sent - before)
        return loss

    def finish(self) -> None:
        """Return when the rows of the next step are there, and all parameters are what they should be."""
        self._model.state_dict()
        if self._engine.split_tables is not None:
            self._engine.split_tables.wait()

    def more(self) -> dict[str, object]:
        """How the tables are kept, and how much of the communication was hidden."""
        under_way_s, waited_s = under_way_and_waited_s(traffic.take_spans())
        traffic.is_tracing = False
        steps = self._steps - self.SETTLED
        placements = self._engine.split_tables.placements() if self._engine.split_tables is not None else {}
        kept = {name: choice.scheme for name, choice in self._engine.ledger.choices.items()}
        return {
            "schemes": kept | {name: placement for name, (placement, _) in placements.items()},
            "payload_bytes_per_step": mean(self._sent_bytes[self.SETTLED :]),
            "under_way_s": under_way_s / steps,
            "waited_s": waited_s / steps,
        }


def main() -> None:
    """Join the mesh, and do what is asked."""
    mesh = tulle.init(data=-1)
    ways = {name: Way(partial(make, mesh=mesh, way=name), sparse=name != DENSE) for name in ABOUT}
    course.serve(ways, barrier=lambda: barrier(mesh["data"]), versions={"tulle": tulle.__version__})


if __name__ == "__main__":
    main()
