"""One rank of the ablation: the same model kept in step in each way, in turns."""

# pyright: reportMissingImports=false
from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from rank import Sleep
from torch import Tensor, nn
from torch.optim import SGD

import tulle
from tulle.comm import barrier, traffic
from tulle.comm.traffic import Span
from tulle.engine import engine_of, split_tables

LINE = 32
"""Tokens of a sample."""
SETTLED = 6
"""Steps before those that are timed: after four the order of pieces is fixed, after three ids are told ahead."""
_COMPUTATION, _WAITING = "computation", "waiting"


@dataclass(frozen=True, slots=True)
class Way:
    """How the model is kept in step.

    Args:
        scheme: Of the table: a scheme, a placement, or `"dense"` if it gets dense gradients.
        ahead: Whether ids are told a step ahead.
        horizontal: Whether dense parameters are updated when they are read.
        vertical: Whether rows that the next batch does not want come later.
    """

    scheme: str
    ahead: bool = False
    horizontal: bool = False
    vertical: bool = False


WAYS = {
    "dense": Way("dense"),
    "allgather": Way("allgather"),
    "balanced": Way("balanced"),
    "rows": Way("rows"),
    "+ lookahead": Way("rows", ahead=True),
    "+ horizontal": Way("rows", ahead=True, horizontal=True),
    "+ vertical": Way("rows", ahead=True, horizontal=True, vertical=True),
    "columns": Way("columns"),
    "columns + lookahead": Way("columns", ahead=True),
}


class Model(nn.Module):
    """A table, and layers of which each reads its weights and then works for a while."""

    def __init__(self, way: Way, job: argparse.Namespace) -> None:
        super().__init__()
        self.words = nn.Embedding(job.rows, job.width, sparse=way.scheme != "dense")
        self.layers = nn.ModuleList(nn.Linear(job.width, job.width) for _ in range(job.layers))
        self.layer_s = job.layer_ms / 1e3

    def forward(self, ids: Tensor) -> Tensor:
        """A loss of `[samples, LINE]` ids."""
        hidden = self.words(ids).mean(1)
        for layer in self.layers:
            hidden = Sleep.apply(layer(hidden).tanh(), self.layer_s)
        return hidden.pow(2).sum(1).mean()


@contextmanager
def delayed(way: Way) -> Iterator[None]:
    """Delay rows where the way does, whether it pays or not."""
    kept, split_tables.WORTH_S = split_tables.WORTH_S, 0.0 if way.vertical else float("inf")
    try:
        yield
    finally:
        split_tables.WORTH_S = kept


def distribute(way: Way, job: argparse.Namespace, mesh: tulle.Mesh) -> tuple[nn.Module, SGD]:
    """The model, made anew: several that live at once would all be told what one looks up."""
    torch.manual_seed(0)
    model = Model(way, job)
    optimizer = SGD(model.parameters(), lr=0.01)
    if way.scheme == "dense":
        return tulle.distribute(model, optimizer, mesh)
    plan = tulle.plan(model, optimizer, mesh).with_rows_split({"words.weight": (job.rows, job.width)}, "given")
    tables = tuple(replace(table, scheme=way.scheme) for table in plan.tables)
    plan = replace(plan, tables=tables, schedule="read" if way.horizontal else "step")
    return tulle.distribute(model, optimizer, mesh, plan=plan)


def batches(job: argparse.Namespace, rank: int) -> list[Tensor]:
    """Enough for a turn, and one more, of which a look ahead tells the rows in the last step."""
    weights = torch.arange(1, job.rows + 1, dtype=torch.float64) ** -1.1
    generator = torch.Generator().manual_seed(rank)
    count = SETTLED + job.steps + 1
    ids = torch.multinomial(weights, count * job.tokens, replacement=True, generator=generator)
    return [*ids.view(count, -1, LINE)]


def turn(way: Way, job: argparse.Namespace, mesh: tulle.Mesh, data: list[Tensor]) -> dict[str, float]:
    """Seconds of a step, of it those with communication under way and those spent waiting, and bytes sent."""
    with delayed(way):
        return timed(way, job, mesh, data)


def timed(way: Way, job: argparse.Namespace, mesh: tulle.Mesh, data: list[Tensor]) -> dict[str, float]:
    """The same, where what the way leaves out is left out."""
    model, optimizer = distribute(way, job, mesh)
    engine = engine_of(model)
    assert engine is not None, "just distributed"
    begin_s, sent_bytes, loss = 0.0, 0, torch.zeros(())
    for number, ids in enumerate(tulle.lookahead(data) if way.ahead else data):
        if number == SETTLED:
            barrier(mesh["data"])
            traffic.is_tracing = True
            traffic.take_spans()
            begin_s, sent_bytes = time.perf_counter(), traffic.total.bytes_sent
        loss = model(ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if number == SETTLED + job.steps - 1:
            break
    model.state_dict()
    if engine.split_tables is not None:
        engine.split_tables.wait()
    barrier(mesh["data"])
    seconds = time.perf_counter() - begin_s
    spans = traffic.take_spans()
    traffic.is_tracing = False
    found = {
        "step_s": seconds,
        "under_way_s": covered_s(span for span in spans if span.track != _COMPUTATION),
        "waited_s": covered_s(span for span in spans if span.track == _WAITING),
        "sent_bytes": traffic.total.bytes_sent - sent_bytes,
    }
    return {name: value / job.steps for name, value in found.items()} | {"loss": loss.item()}


def covered_s(spans: Iterable[Span]) -> float:
    """Seconds in which at least one of the spans was going on."""
    total_s, end_s = 0.0, float("-inf")
    for span in sorted(spans, key=lambda span: span.begin_s):
        total_s += max(0.0, span.end_s - max(end_s, span.begin_s))
        end_s = max(end_s, span.end_s)
    return total_s


def parse() -> argparse.Namespace:
    """Read what the driver says."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("rows", "width", "tokens", "layers", "turns", "steps"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--layer-ms", type=float, required=True)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=[*WAYS])
    return parser.parse_args()


def main() -> None:
    """Take turns; rank 0 prints what each way took in each turn, on the slowest rank."""
    job = parse()
    mesh = tulle.init(data=-1)
    data = batches(job, mesh.rank)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in job.ways}
    for number in range(job.turns):
        for name in job.ways if number % 2 == 0 else reversed(job.ways):
            found[name].append(turn(WAYS[name], job, mesh, data))
            gc.collect()
    heard: list[dict[str, list[dict[str, float]]]] = [{} for _ in range(mesh.size)]
    dist.all_gather_object(heard, found)
    if mesh.rank == 0:
        ways = {
            name: {
                what: [max(rank[name][turn][what] for rank in heard) for turn in range(job.turns)]
                for what in found[name][0]
            }
            for name in job.ways
        }
        losses = [loss for way in ways.values() for loss in way.pop("loss")]
        difference = (max(losses) - min(losses)) / min(losses)
        print(json.dumps({"ways": ways, "largest relative difference of a loss": difference}), flush=True)


if __name__ == "__main__":
    main()
