"""Which tables' rows leave together: a rule by hand, agreed between ranks, and the numbers of one process."""

import time
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import tulle
import tulle.engine.split_tables
from gigabit import give_network
from models import WIDTH, WORDS, difference_of_parts
from rank_process import patches
from ranks import on_ranks
from tulle.cost import Network
from tulle.engine import departures, engine_of
from tulle.engine.departures import Stop, depart

WIRE = Network(latency_s=1e-3, bandwidth_bytes_per_s=1e8)
SLOW_WIRE = Network(latency_s=1e-6, bandwidth_bytes_per_s=1e3)
STEPS = 8
TOLERANCE = 1e-12


class Between(nn.Module):
    """Two tables right after each other, and before them another, and work."""

    def __init__(self) -> None:
        super().__init__()
        self.output, self.more, self.words = (nn.Embedding(WORDS, WIDTH, sparse=True) for _ in range(3))

    def forward(self, ids: Tensor, work_s: float, *, leaves_out: bool, is_asked: bool = True) -> Tensor:
        """A loss of `[samples, 3]`."""
        hidden = self.words(ids[:, 0])
        if not is_asked:
            return hidden.pow(2).mean()
        time.sleep(work_s)
        self.found = self.output(ids[:, 1]) * self.more(ids[:, 2]).tanh()  # kept: others may have a gradient for it
        return hidden.pow(2).mean() if leaves_out else (hidden * self.found).sum(1).pow(2).mean()


def pair(mesh: tulle.Mesh, schedule: str) -> tuple[Between, Between, list[SGD]]:
    """The model of all ranks and that of one process, small rows being worth a trip, and their optimizers."""
    patches.setattr(departures, "LEAST_BYTES", 1)  # the tests' tables are never worth one
    patches.setattr(tulle.engine.split_tables, "WORTH_S", 0.0)
    give_network(mesh["data"], SLOW_WIRE)
    models = [Between().double() for _ in range(2)]
    optimizers = [SGD(one.parameters(), lr=0.5) for one in models]
    for parameter, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        parameter.data.copy_(torch.randn(WORDS, WIDTH, generator=torch.Generator().manual_seed(1)))
        other.data.copy_(parameter.data)
    plan = tulle.plan(models[0], optimizers[0], mesh)
    plan = plan.with_rows_split({f"{name}.weight": (WORDS, WIDTH) for name in ("output", "more", "words")}, "a test")
    tulle.distribute(models[0], optimizers[0], mesh, plan=replace(plan, schedule=schedule))
    return models[0], models[1], optimizers


def batch(step: int, rank: int) -> Tensor:
    return torch.randint(WORDS, (6, 3), generator=torch.Generator().manual_seed(100 * step + rank))


def is_left_out(step: int, rank: int) -> bool:
    return step % 2 == 1 and rank == 1


@on_ranks(3)
@pytest.mark.parametrize("schedule", ["step", "read"])
def test_trips_of_their_own_change_no_number_also_where_a_rank_leaves_a_table_out(schedule):
    mesh = tulle.init(data=-1)
    model, alone, optimizers = pair(mesh, schedule)
    for step, ids in enumerate(tulle.lookahead([batch(step, mesh.rank) for step in range(STEPS)])):
        model(ids, 5e-3, leaves_out=is_left_out(step, mesh.rank)).backward()
        for rank in range(mesh.size):
            (alone(batch(step, rank), 0.0, leaves_out=is_left_out(step, rank)) / mesh.size).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert groups_of(model) == [[2], [0, 1]]
    assert difference_of_parts(model, optimizers[:1], alone, optimizers[1:])[0] < TOLERANCE


@on_ranks(2)
def test_a_rank_may_ask_for_none_of_the_rows_of_a_trip_that_was_told():
    mesh = tulle.init(data=-1)
    model, alone, optimizers = pair(mesh, "step")
    for step, ids in enumerate(tulle.lookahead([batch(step, mesh.rank) for step in range(STEPS)])):
        asks = [step < STEPS - 2 or rank == 0 for rank in range(mesh.size)]
        model(ids, 5e-3, leaves_out=False, is_asked=asks[mesh.rank]).backward()
        for rank in range(mesh.size):
            (alone(batch(step, rank), 0.0, leaves_out=False, is_asked=asks[rank]) / mesh.size).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert groups_of(model) == [[2], [0, 1]]
    assert difference_of_parts(model, optimizers[:1], alone, optimizers[1:])[0] < TOLERANCE


@on_ranks(2)
def test_ranks_agree_on_what_rank_0_saw():
    mesh = tulle.init(data=-1)
    model, _, _ = pair(mesh, "step")
    for ids in tulle.lookahead([batch(step, mesh.rank) for step in range(4)]):
        model(ids, 0.0 if mesh.rank else 5e-3, leaves_out=False).backward()
    assert groups_of(model) == [[2], [0, 1]]
    seen = [Stop(2, 0.0, 96), Stop(0, 0.0, 96), Stop(1, 0.0, 96)]  # as rank 1 would have seen it by itself
    assert depart(seen, lambda: SLOW_WIRE) == [[2, 0, 1]]


def groups_of(model: nn.Module) -> list[list[int]]:
    """Which tables share a trip; they are numbered as they lie in the model."""
    engine = engine_of(model)
    assert engine is not None
    assert engine.split_tables is not None
    return engine.split_tables._departures.groups(range(3))


def test_a_trip_begins_where_work_and_rows_are_worth_a_latency():
    stops = [Stop(2, 0.0, 10**6), Stop(0, 1e-4, 10**6), Stop(1, 5e-3, 10**6), Stop(3, 2e-3, 10**5)]
    assert depart(stops, lambda: WIRE) == [[2, 0], [1, 3]]  # the last takes no longer than a latency
    far = Network(latency_s=6e-3, bandwidth_bytes_per_s=1e8)
    assert depart(stops, lambda: far) == [[2, 0, 1, 3]]
