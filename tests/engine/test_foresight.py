"""What forward looks up is what backward's gradients have: told ahead, checked, and right where it was not so."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn

import models
import tulle
from lookups import (
    FORESEEN,
    NOT_FORESEEN,
    STEPS,
    Beside,
    Case,
    Lookups,
    bags,
    drops_a_lookup_on_the_last_rank_in_one_step,
    looks_up_on_changing_ranks,
    mixes_functional_lookups,
    train,
)
from models import batches, build
from ranks import on_ranks
from tulle.comm import Deferred
from tulle.engine import engine_of, foresight
from tulle.engine.tables import TableSync
from tulle.sync import SCHEMES

SOON_S = 20.0  # a wait that ends at once where all is well


@contextmanager
def foretold() -> Iterator[None]:
    """Rows are told ahead, where so few would travel with their values in one message."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TableSync, "packet", lambda sync, slots, last: None)
        yield


@contextmanager
def answers_heard() -> Iterator[list[bool]]:
    """Whether what was told ahead turned out right, each time that the ranks confirmed it to one another."""
    heard: list[bool] = []
    original = TableSync.confirm

    def confirm(sync: TableSync, is_right: bool) -> Deferred[bool]:  # noqa: FBT001 - as in the original
        asked = original(sync, is_right)

        def finish() -> bool:
            heard.append(asked.wait())
            return heard[-1]

        return Deferred(finish)

    with foretold(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(TableSync, "confirm", confirm)
        yield heard


def hear(case: Case, mesh: tulle.Mesh, plan: str = "auto") -> tuple[nn.Module, list[bool]]:
    """Train with rows told ahead; the model, and the answers."""
    with answers_heard() as heard:
        return train(case, mesh, plan), heard


@on_ranks(2, 3)
def test_what_forward_looked_up_is_told_ahead_and_right():
    mesh = tulle.init(data=-1)
    for case in FORESEEN:
        model, heard = hear(case, mesh)
        groups = engine_of(model).reducer.groups
        assert all(group._is_foreseeable for group in groups), case[1].__name__
        # The first step, in which the tables are found, has nobody to tell.
        assert heard == [True] * (STEPS - 1) * len(groups), case[1].__name__


@on_ranks(2, 3)
def test_what_was_told_in_vain_is_told_anew_and_no_longer_ahead():
    mesh = tulle.init(data=-1)
    for case in NOT_FORESEEN:
        model, heard = hear(case, mesh)
        assert not any(group._is_early for group in engine_of(model).reducer.groups), case[1].__name__
        assert 1 <= heard.count(False) <= 2, f"{case[1].__name__}: {heard}, in forward, in backward, then never again"
        if heard.count(False) == 2:
            assert heard[-1] is False
            assert not any(group._is_foreseeable for group in engine_of(model).reducer.groups), case[1].__name__
        told = tulle.comm.gather_values(heard, mesh["data"], label="here")
        assert told == [heard] * mesh.size, "on all ranks alike"


@on_ranks(3)
def test_every_scheme_takes_rows_that_are_told_ahead_and_rows_that_are_not():
    mesh = tulle.init(data=-1)
    for scheme in SCHEMES:
        _, heard = hear((Beside, looks_up_on_changing_ranks), mesh, scheme)
        assert heard == [True] * (STEPS - 1)
        _, heard = hear((bags, drops_a_lookup_on_the_last_rank_in_one_step), mesh, scheme)
        assert heard == [True, False, True], "told in forward, in vain, and from then on in backward"


class FirstWord(nn.Module):
    """Looks up the first column of its batch, of which one row keeps the stride."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(models.WORDS, models.WIDTH, sparse=True)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.words(ids[:, 0]).pow(2).sum()


@on_ranks(2, 3)
def test_a_column_of_one_sample_is_told_by_every_scheme():
    mesh = tulle.init(data=-1)
    ids = batches(1, mesh.size)[0]
    alone = build(FirstWord, seed=0)
    (alone(ids) / mesh.size).backward()
    for scheme in SCHEMES:
        model = build(FirstWord, seed=0)
        model, _ = tulle.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), mesh, plan=scheme)
        with foretold():
            for _ in range(2):  # looked up after the first is told in forward
                model.zero_grad()
                model(ids[mesh.rank : mesh.rank + 1]).backward()
        gradient = model.words.weight.grad.to_dense()
        assert torch.allclose(gradient, alone.words.weight.grad.to_dense(), rtol=1e-12), scheme


@on_ranks(2)
def test_the_comparison_can_fail_where_a_wrong_foresight_is_believed():
    mesh = tulle.init(data=-1)
    with foretold(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(TableSync, "confirm", lambda sync, is_right: Deferred(lambda: True))
        with pytest.raises(AssertionError, match=r"the gradient of words.weight differs"):
            train((Lookups, mixes_functional_lookups), mesh)


@on_ranks(2)
def test_rows_are_told_while_forward_still_computes_and_not_from_one_that_is_not_for_training():
    mesh = tulle.init(data=-1)
    model, [optimizer] = tulle.distribute(model := build(Lookups, 0), models.sgd(model), mesh, plan="allgather")
    for step, ids in enumerate(batches(3, 4)):
        groups = engine_of(model).reducer.groups
        with torch.no_grad():
            model.words(ids)
        assert not any(group.is_foreseen for group in groups)
        looked_up = model.words(ids)
        assert [group.is_foreseen for group in groups] == [True] * (step > 0)
        for group in groups:
            group._settled._future.result(SOON_S)  # no rank has begun its backward
        model.read(looked_up).backward()
        optimizer.step()
        optimizer.zero_grad()


@on_ranks(1, 2)
@pytest.mark.parametrize("kind", [models.Words, models.Tied])
def test_lookups_are_not_kept_from_step_to_step(kind):
    mesh = tulle.init(data=-1)
    model, [optimizer] = tulle.distribute(model := build(kind, 0), models.sgd(model), mesh)
    for ids in batches(3, 4):
        model(ids).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert all(not foresight._noted for foresight in engine_of(model).reducer.foresights.values())


@on_ranks(2)
def test_forwards_without_a_backward_keep_no_more_lookups_than_a_few_steps_have(monkeypatch):
    monkeypatch.setattr(foresight, "_MOST_NOTED", 40)
    mesh = tulle.init(data=-1)
    pair = [tulle.distribute(m := build(models.Words, 0), models.sgd(m), mesh, plan="allgather") for _ in range(2)]
    (model, _), (twin, _) = pair
    notes = engine_of(model).reducer.foresights.values()
    for step, ids in enumerate(batches(4, 6)):
        share = ids.chunk(mesh.size)[mesh.rank]
        for _ in range(40 * (step == 1)):
            model(share)
        assert all(sum(map(len, noted._noted)) < 200 for noted in notes), "40 lookups of 15 ids were 600"
        for one, [optimizer] in pair:
            one(share).backward()
            optimizer.step()
        for parameter, other in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(parameter, other)
            parameter.grad = other.grad = None
