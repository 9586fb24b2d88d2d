"""One rank of the ablation: the same model kept in step in each way, in turns."""

# pyright: reportMissingImports=false
from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import SGD

import tulle
from tulle.comm import barrier, gather_values, traffic
from tulle.comm.traffic import under_way_and_waited_s
from tulle.engine import engine_of, split_tables

sys.path.insert(0, str(Path(__file__).parents[1] / "cluster"))

from turns import Sleep

LINE = 32
"""Tokens of a sample."""
COMPARED = 3
"""The step, from 0, whose loss all ways must have."""


@dataclass(frozen=True, slots=True)
class Way:
    """How the model is kept in step.

    Args:
        scheme: Of the table: a scheme, a placement, or `"dense"` if it gets dense gradients.
        ahead: Whether ids are told a step ahead.
        horizontal: Whether dense parameters are updated when they are read.
        vertical: Whether rows that the next batch does not want come later.
        settled: Steps before those that are timed: ids are told ahead after three, pieces have their order after four.
        most_steps: That are timed, where each takes long and they are alike.
    """

    scheme: str
    ahead: bool = False
    horizontal: bool = False
    vertical: bool = False
    settled: int = 3
    most_steps: int = 1000


WAYS = {
    "dense": Way("dense", settled=2, most_steps=2),
    "allgather": Way("allgather"),
    "balanced": Way("balanced"),
    "rows": Way("rows"),
    "+ lookahead": Way("rows", ahead=True, settled=4),
    "+ horizontal": Way("rows", ahead=True, horizontal=True, settled=6),
    "+ vertical": Way("rows", ahead=True, horizontal=True, vertical=True, settled=6),
    "columns": Way("columns"),
    "columns + lookahead": Way("columns", ahead=True, settled=4),
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
    optimizer = SGD(model.parameters(), lr=0.1)
    if way.scheme == "dense":
        return tulle.distribute(model, optimizer, mesh)
    plan = tulle.plan(model, optimizer, mesh).with_rows_split({"words.weight": (job.rows, job.width)}, "given")
    tables = tuple(replace(table, scheme=way.scheme) for table in plan.tables)
    plan = replace(plan, tables=tables, schedule="read" if way.horizontal else "step")
    return tulle.distribute(model, optimizer, mesh, plan=plan)


def batches(job: argparse.Namespace, rank: int) -> list[Tensor]:
    """Enough for any way, and one more, of which a look ahead tells the rows in the last step."""
    weights = torch.arange(1, job.rows + 1, dtype=torch.float64) ** -1.1
    generator = torch.Generator().manual_seed(rank)
    count = max(way.settled for way in WAYS.values()) + job.steps + 1
    ids = torch.multinomial(weights, count * job.tokens, replacement=True, generator=generator)
    return [*ids.view(count, -1, LINE)]


def timed(way: Way, job: argparse.Namespace, mesh: tulle.Mesh, data: list[Tensor]) -> dict[str, float]:
    """Seconds of a step, of it those with communication under way and those spent waiting, bytes sent, and a loss."""
    model, optimizer = distribute(way, job, mesh)
    engine = engine_of(model)
    assert engine is not None, "just distributed"
    steps = min(job.steps, way.most_steps)
    begin_s, sent_bytes, compared = 0.0, 0, 0.0
    for number, ids in enumerate(tulle.lookahead(data) if way.ahead else data):
        if number == way.settled:
            barrier(mesh["data"])
            traffic.is_tracing = True
            traffic.take_spans()
            begin_s, sent_bytes = time.perf_counter(), traffic.total.bytes_sent
        loss = model(ids)
        compared = loss.item() if number == COMPARED else compared
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if number == way.settled + steps - 1:
            break
    model.state_dict()
    if engine.split_tables is not None:
        engine.split_tables.wait()
    barrier(mesh["data"])
    seconds = time.perf_counter() - begin_s
    under_way_s, waited_s = under_way_and_waited_s(traffic.take_spans())
    traffic.is_tracing = False
    sent_bytes = traffic.total.bytes_sent - sent_bytes
    found = {"step_s": seconds, "under_way_s": under_way_s, "waited_s": waited_s, "sent_bytes": sent_bytes}
    return {name: value / steps for name, value in found.items()} | {"loss": compared}


def parse() -> argparse.Namespace:
    """Read what the driver says."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("rows", "width", "tokens", "layers", "turns", "steps"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--layer-ms", type=float, required=True)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=[*WAYS])
    parser.add_argument("--found", type=Path, required=True, help="JSON by turn and way: what is there is not measured")
    return parser.parse_args()


def main() -> None:
    """Take turns; rank 0 writes what each way took on the slowest rank as soon as it is known."""
    job = parse()
    turns: list[dict[str, dict[str, float]]] = json.loads(job.found.read_text()) if job.found.exists() else []
    mesh = tulle.init(data=-1)  # which all ranks have come to, and have read the file, before anything is written
    data = batches(job, mesh.rank)
    for number in range(job.turns):
        if number == len(turns):
            turns.append({})
        for name in job.ways if number % 2 == 0 else reversed(job.ways):
            if name in turns[number]:
                continue
            with delayed(WAYS[name]):
                mine = timed(WAYS[name], job, mesh, data)
            gc.collect()
            heard = gather_values(mine, mesh["data"], label=name)
            turns[number] |= {name: {what: max(of_rank[what] for of_rank in heard) for what in mine}}
            if mesh.rank == 0:
                write(job.found, turns)


def write(path: Path, turns: list[dict[str, dict[str, float]]]) -> None:
    """The file is complete or as it was."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.write_text(json.dumps(turns))
    aside.replace(path)


if __name__ == "__main__":
    main()
