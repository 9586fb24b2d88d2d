"""The promise that a scheme costs what `cost` says: bytes and messages that the ranks count are those it predicts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

import pytest
import torch
from torch import Tensor

import tulle
from ranks import on_ranks
from tulle import RowSparse
from tulle.comm import all_gather, traffic
from tulle.cost import Cost, Network
from tulle.mesh import Axis
from tulle.presence import Presence, presence_like
from tulle.sync import SCHEMES, Table, announce, sum_gradients

CPU = torch.device("cpu")
NETWORK = Network(latency_s=1e-4, bandwidth_bytes_per_s=1e9)
TOLERANCE = 0.02


def few(num_rows: int, ranks: int) -> list[Tensor]:
    return [some_rows(num_rows, 3, rank) for rank in range(ranks)]


def many(num_rows: int, ranks: int) -> list[Tensor]:
    return [some_rows(num_rows, num_rows // 4 + rank, rank) for rank in range(ranks)]


def all_rows(num_rows: int, ranks: int) -> list[Tensor]:
    return [torch.arange(num_rows)] * ranks


def skewed(num_rows: int, ranks: int) -> list[Tensor]:
    zipf = presence_like(num_rows, tuple(num_rows // (5 + rank) for rank in range(ranks)))
    return [zipf.rows[held] for held in zipf.held]


def clustered_at_the_end(num_rows: int, ranks: int) -> list[Tensor]:
    return [torch.arange(num_rows - 9 - rank, num_rows) for rank in range(ranks)]


def one_rank_empty(num_rows: int, ranks: int) -> list[Tensor]:
    return [torch.empty(0, dtype=torch.int64), *many(num_rows, ranks - 1)]


def only_the_last(num_rows: int, ranks: int) -> list[Tensor]:
    return [*([torch.empty(0, dtype=torch.int64)] * (ranks - 1)), some_rows(num_rows, 17, 0)]


def all_empty(num_rows: int, ranks: int) -> list[Tensor]:
    del num_rows
    return [torch.empty(0, dtype=torch.int64)] * ranks


SPREADS: list[Callable[[int, int], list[Tensor]]] = [
    few,
    many,
    all_rows,
    skewed,
    clustered_at_the_end,
    one_rank_empty,
    only_the_last,
    all_empty,
]
SHAPES: list[tuple[int, int, torch.dtype | None]] = [
    (40, 1, None),
    (40, 300, torch.bfloat16),
    (999, 1, torch.bfloat16),
    (999, 16, None),
    (999, 300, None),
    (5000, 1, None),
    (5000, 16, torch.bfloat16),
]


@dataclass(frozen=True)
class Sent:
    """What each rank sent, as it counted."""

    bytes: list[int]
    messages: list[int]

    def fits(self, promised: Cost) -> bool:
        """Whether the rank that sent most bytes sent those promised, in as many messages."""
        most = max(self.bytes)
        messages = [messages for sent, messages in zip(self.bytes, self.messages, strict=True) if sent == most]
        return promised.bytes == pytest.approx(most, rel=TOLERANCE, abs=1) and promised.messages in messages


def some_rows(num_rows: int, count: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(num_rows, generator=generator)[:count].sort().values


def sent_by_all_ranks(scheme: str, table: Table, held: Sequence[Tensor], axis: Axis) -> Sent:
    """Sum rows by a scheme, and tell what each rank sent for it."""
    mine = held[axis.rank]
    rows = RowSparse.trusted(mine, torch.ones(len(mine), table.width), table.num_rows, is_coalesced=True)
    counts = announce([rows], axis).wait()
    before = traffic.total.bytes_sent, traffic.total.messages
    sum_gradients([rows], [table], counts, [scheme], axis).wait()
    sent = [traffic.total.bytes_sent - before[0], traffic.total.messages - before[1]]
    told = all_gather(torch.tensor(sent), axis, label="what was sent").wait().tolist()
    return Sent([rank[0] for rank in told], [rank[1] for rank in told])


@on_ranks(2, 3, 4)
@pytest.mark.parametrize("scheme", [*SCHEMES])
def test_counted_bytes_and_messages_are_those_that_the_cost_promised(scheme):
    axis = tulle.init(data=-1)["data"]
    wrong: list[object] = []
    # On 3 ranks, which are no power of two, all; on 2 and 4 every shape and every spread, but not all pairs of them.
    points = [*product(SHAPES, SPREADS)][:: 1 if axis.size == 3 else 3]
    for (num_rows, width, wire), spread in points:
        table = Table("words", num_rows, width, torch.float32, CPU, wire_dtype=wire)
        held = spread(num_rows, axis.size)
        looks = table.characteristics([len(rows) for rows in held], Presence.of(held))
        promised = SCHEMES[scheme].cost(looks, NETWORK, axis.size)
        sent = sent_by_all_ranks(scheme, table, held, axis)
        if not sent.fits(promised):
            wrong.append((spread.__name__, num_rows, width, wire, promised, sent))
    assert not wrong


@on_ranks(3)
@pytest.mark.parametrize("scheme", [*SCHEMES])
def test_the_promise_can_break_where_rows_are_more_than_the_cost_was_told(scheme):
    axis = tulle.init(data=-1)["data"]
    table = Table("words", 999, 1, torch.float32, CPU)
    held = many(999, axis.size)
    told = few(999, axis.size)
    looks = table.characteristics([len(rows) for rows in told], Presence.of(told))
    sent = sent_by_all_ranks(scheme, table, held, axis)
    assert not sent.fits(SCHEMES[scheme].cost(looks, NETWORK, axis.size))


@pytest.mark.parametrize("scheme", [*SCHEMES])
def test_one_rank_alone_sends_nothing(scheme):
    held = many(999, 1)
    looks = Table("words", 999, 16, torch.float32, CPU).characteristics([len(held[0])], Presence.of(held))
    cost = SCHEMES[scheme].cost(looks, NETWORK, 1)
    assert (cost.bytes, cost.messages, cost.seconds) == (0, 0, 0.0)
