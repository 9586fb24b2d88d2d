"""Few rows travel in one message with their numbers: right whatever the gradients are, on all ranks alike."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn

import models
import tulle
from gigabit import GIGABIT, give_network
from lookups import FORESEEN, NOT_FORESEEN, Beside, Lookups, makes_a_gradient_dense_on_rank_0, train
from models import WORDS, batches, build
from ranks import on_ranks
from tulle.comm import gather_values, traffic
from tulle.cost import Network
from tulle.engine import engine_of
from tulle.sync import Packet


@contextmanager
def packets_sent() -> Iterator[list[bool]]:
    """Of each packet that this rank sent, whether the sums were in it."""
    sent: list[bool] = []
    exchange = Packet.exchange

    def watched(packet: Packet, words, gradients, axis):
        pending = exchange(packet, words, gradients, axis)
        sent.append(pending.wait().sum([words[: len(gradients)] for words in pending.wait().words()]) is not None)
        return pending

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Packet, "exchange", watched)
        patch.setattr("tulle.sync.packet.release", lambda *_: None)  # the sums are taken a second time
        yield sent


@on_ranks(2, 3)
def test_gradients_are_those_of_one_process_however_rows_are_looked_up():
    mesh = tulle.init(data=-1)
    for case in [*FORESEEN, *NOT_FORESEEN]:
        with packets_sent() as sent:
            model = train(case, mesh)
        assert sent, case[1].__name__
        assert gather_values(sent, mesh["data"], label="here") == [sent] * mesh.size, "on all ranks alike"
        if case in FORESEEN[:1]:
            assert sent == [True] * 3, "from the second step on"
            assert engine_of(model).reducer.groups[0]._packet.sections[0].room >= 4


@on_ranks(2)
def test_a_dense_gradient_is_summed_all_the_same_and_rows_are_foretold_once():
    mesh = tulle.init(data=-1)
    with packets_sent() as sent:
        train((Lookups, makes_a_gradient_dense_on_rank_0), mesh)
    assert sent == [True, False], "of steps 2 and 3; in step 4 the counts go ahead"


@on_ranks(2, 3)
def test_more_rows_than_there_is_room_for_go_the_long_way_and_make_room():
    mesh = tulle.init(data=-1)
    axis = give_network(mesh["data"])
    model, [optimizer] = tulle.distribute(model := build(Beside, 0), models.sgd(model), mesh)
    rooms: list[int] = []
    with packets_sent() as sent:
        for ids in (3, 3, WORDS, WORDS, WORDS, 3):
            used = torch.arange(ids if axis.rank == axis.size - 1 else 3)
            (model.read(model.words(used)) + model.read(model.tags(used))).backward()
            assert model.words.weight.grad.coalesce().indices().tolist() == [[*range(ids)]]
            optimizer.step()
            optimizer.zero_grad()
            rooms.append(engine_of(model).reducer.groups[0]._packet.sections[0].room)
    assert sent == [True, False, True, True, True]
    assert rooms == [9, 9, *[rooms[2]] * 3, rooms[5]]
    assert 2 * WORDS < rooms[2] <= 1.2 * 2 * WORDS
    assert 2 * WORDS < rooms[5] < rooms[2], "what it was is forgotten, but slowly"


class Fields(Lookups):
    """Of a factorization machine: a weight and a vector for each word, and a table in another dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Embedding(WORDS, 1, sparse=True)
        self.tags = nn.Embedding(WORDS, 3, sparse=True)

    def double(self) -> "Fields":
        """But for the tags."""
        super().double().tags.float()
        return self

    def forward(self, ids: torch.Tensor, *, with_tags: bool = True) -> torch.Tensor:
        loss = self.read(self.words(ids)) + self.weights(ids).pow(2).sum()
        return loss + self.tags(ids % 7).sin().sum() if with_tags else loss


@on_ranks(2, 3, 4)
def test_tables_of_several_widths_and_dtypes_travel_in_one_packet_with_the_same_sums():
    mesh = tulle.init(data=-1)
    axis = give_network(mesh["data"])
    models_of = {
        plan: tulle.distribute(model := build(Fields, 0), models.adagrad(model), mesh, plan=plan)
        for plan in ("auto", "allgather")
    }
    is_last = axis.rank == axis.size - 1
    scripts = [
        lambda model: model(torch.arange(3 + axis.rank)).backward(),
        lambda model: model(torch.arange(WORDS if is_last else 2)).backward(),  # more than there is room for
        lambda model: model(torch.arange(WORDS).flip(0)).backward(),
        lambda model: model(torch.arange(0 if is_last else 2)).backward(),  # no row
        lambda model: model(torch.arange(9), with_tags=not is_last).backward(),
        in_two_micro_batches,
        lambda model: model(torch.arange(5), with_tags=False).backward(),  # a table that no rank uses
        lambda model: model(torch.arange(5)).backward(),
        lambda model: model(torch.arange(5)).backward(),
    ]
    with packets_sent() as sent:
        for step, script in enumerate(scripts):
            for model, [optimizer] in models_of.values():
                script(model)
                optimizer.step()
            pairs = zip(*(model.parameters() for model, _ in models_of.values()), strict=True)
            for mine, theirs in pairs:
                assert (mine.grad is None) == (theirs.grad is None), step
                assert mine.grad is None or torch.equal(mine.grad.to_dense(), theirs.grad.to_dense()), step
                assert torch.equal(mine, theirs), step
            for model, _ in models_of.values():
                model.zero_grad()
    assert sent == [False, True, True, True, True, False, True], "not after the first step, nor an unused table's"


def in_two_micro_batches(model: nn.Module) -> None:
    with model.no_sync():
        model(torch.arange(4)).backward()
    model(torch.arange(2, 8)).backward()


@on_ranks(2)
def test_a_packet_is_one_message_to_each_rank_where_rows_foretold_are_four():
    mesh = tulle.init(data=-1)
    messages: dict[str, int] = {}
    for plan in ("auto", "allgather"):
        give_network(mesh["data"])
        model, [optimizer] = tulle.distribute(model := build(Lookups, 0), models.sgd(model), mesh, plan=plan)
        for ids in batches(4, 4):
            before = traffic.total.messages
            model.read(model.words(ids)).backward()
            messages[plan] = traffic.total.messages - before
            optimizer.step()
            optimizer.zero_grad()
    assert messages["allgather"] - messages["auto"] == 3, "row numbers, counts, and whether they were right"


@on_ranks(2)
def test_where_rows_are_many_or_a_scheme_is_given_no_packet_is_sent():
    mesh = tulle.init(data=-1)
    slow = Network(latency_s=1e-7, bandwidth_bytes_per_s=1e3)
    for plan, network in (("auto", slow), ("allgather", GIGABIT), ("densify", GIGABIT)):
        axis = mesh["data"]
        axis.measured.clear()
        give_network(axis, network)
        model, [optimizer] = tulle.distribute(model := build(Lookups, 0), models.sgd(model), mesh, plan=plan)
        with packets_sent() as sent:
            for ids in batches(3, 4):
                looks_at(model, ids).backward()
                optimizer.step()
                optimizer.zero_grad()
        assert not sent, plan


@on_ranks(2)
def test_a_table_without_columns_is_sent_without_a_packet():
    mesh = tulle.init(data=-1)
    give_network(mesh["data"])
    model = nn.Embedding(WORDS, 0, sparse=True)
    tulle.distribute(model, models.sgd(model), mesh)
    for ids in batches(3, 2):
        model.zero_grad()
        model(ids).sum().backward()
        assert model.weight.grad.shape == (WORDS, 0)


def looks_at(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return model.read(model.words(ids))
