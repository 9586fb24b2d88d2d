"""Loops over `tulle.lookahead` with tables that are split: within one another, and over batches that change."""

import gc

import pytest
import torch
from split_networks import ROWS, build, step, worst
from torch.optim import SGD, SparseAdam

import tulle
from models import batches
from ranks import on_ranks
from tulle.engine import engine_of
from tulle.errors import ModelError
from tulle.plan import Plan, TablePlan
from tulle.tables import split_of

TOLERANCE = 1e-12


def written(weight):
    weight.clamp_(-0.5, 0.5)


def written_by_data(weight):
    weight.data.clamp_(-0.5, 0.5)


def given_other_data(weight):
    weight.data = weight.data.clamp(-0.5, 0.5)


def written_unseen(weight):
    weight.detach().data.clamp_(-0.5, 0.5)


@on_ranks(2)
@pytest.mark.parametrize(
    ("write", "schedule"),
    [
        (written, "step"),
        (written_by_data, "step"),
        (written_by_data, "read"),
        (given_other_data, "step"),
        (given_other_data, "read"),
        (written_unseen, "step"),
    ],
)
def test_rows_that_are_written_between_their_fetch_and_the_lookup_are_fetched_anew_or_refused(write, schedule):
    mesh = tulle.init(data=-1)
    reference, model = build("embedding", 0), build("embedding", 0)
    theirs, ours = SGD(reference.parameters(), lr=0.5), SGD(model.parameters(), lr=0.5)
    table = TablePlan("table.weight", *model.table.weight.shape, "rows", "given")
    tulle.distribute(model, ours, mesh, plan=Plan({"data": mesh.size}, (table,), schedule=schedule))
    data = batches(6, 4 * mesh.size)
    loop = zip(data, tulle.lookahead([ids.chunk(mesh.size)[mesh.rank] for ids in data]), strict=True)

    def train() -> None:
        for whole, ids in loop:
            step(reference, [theirs], [reference(whole)])
            step(model, [ours], [model(ids)])
            with torch.no_grad():
                written(reference.table.weight)
                write(model.table.weight)

    if write is written_unseen:
        with pytest.raises(ModelError, match=r"rows of table.weight were written, by .detach\(\).data say, after they"):
            train()
        return
    train()
    assert worst(model, reference) < TOLERANCE


def validated(model, optimizer, cut):
    """A loop that begins, and is interrupted by, loops without gradients."""
    data = [cut(ids) for ids in batches(8, 6)]
    for number, ids in enumerate(tulle.lookahead([*data[:2], *data])):
        if number % 4 == 1:
            with torch.no_grad():
                for other in tulle.lookahead(data[:3]):
                    model(other)
        if number > 1:
            step(model, [optimizer], [model(ids)])


def side_by_side(model, optimizer, cut):
    data = [cut(ids) for ids in batches(8, 6)]
    for ids, others in zip(tulle.lookahead(data), tulle.lookahead(data[::-1]), strict=True):
        step(model, [optimizer], [model(ids) + 2 * model(others)])


def left_and_dropped_within_the_next(model, optimizer, cut):
    data = [cut(ids) for ids in batches(8, 6)]
    left = iter(tulle.lookahead(data))
    for _ in range(4):
        step(model, [optimizer], [model(next(left))])
    for number, ids in enumerate(tulle.lookahead(data)):
        if number == 5:
            left.close()
        step(model, [optimizer], [model(ids)])
    step(model, [optimizer], [model(data[0])])


def masked_in_place(model, optimizer, cut):
    masks = torch.rand(8, 6, 5, generator=torch.Generator().manual_seed(1)) < 0.3
    for mask, ids in zip(masks, tulle.lookahead([cut(ids).clone() for ids in batches(8, 6)]), strict=True):
        ids[cut(mask)] = ROWS - 1
        step(model, [optimizer], [model(ids)])


@on_ranks(2)
@pytest.mark.parametrize("loop", [validated, side_by_side, left_and_dropped_within_the_next, masked_in_place])
def test_loops_within_loops_and_batches_that_change_in_them_give_the_numbers_of_one_process(loop):
    mesh = tulle.init(data=-1)
    reference, model = build("embedding", 0), build("embedding", 0)
    theirs, ours = SGD(reference.parameters(), lr=0.5), SGD(model.parameters(), lr=0.5)
    tulle.distribute(model, ours, mesh, plan="rows")
    loop(model, ours, lambda whole: whole.chunk(mesh.size)[mesh.rank])
    loop(reference, theirs, lambda whole: whole)
    assert worst(model, reference) < TOLERANCE


@on_ranks(2)
@pytest.mark.parametrize("is_made_later", [False, True])
def test_all_ranks_fetch_anew_after_a_second_step_that_writes_nothing_on_some(is_made_later):
    mesh = tulle.init(data=-1)
    reference, model = build("sum", 0), build("sum", 0)
    theirs, ours = (SparseAdam([one.table.weight], lr=0.1) for one in (reference, model))
    tulle.distribute(model, ours, mesh, plan="rows")
    others = [SparseAdam([one.table.weight], lr=0.1) for one in (reference, model)] if is_made_later else [theirs, ours]
    held = split_of(model.table.weight).rows(0)[0]  # rank 1 has none of the rows that get gradients
    data = [held[ids % len(held)] for ids in batches(4, 4)]
    loops = data, tulle.lookahead(data, ids=lambda ids: ids)
    for one, first, second, loop in zip((reference, model), (theirs, ours), others, loops, strict=True):
        for ids in loop:
            one(ids).backward()
            first.step()
            second.step()
            first.zero_grad()
    assert worst(model, reference) < TOLERANCE


@on_ranks(2)
def test_an_evaluation_teaches_nothing_of_where_ids_lie():
    mesh = tulle.init(data=-1)
    model = build("embedding", 0)
    optimizer = SGD(model.parameters(), lr=0.1)
    tulle.distribute(model, optimizer, mesh, plan="rows")
    data = batches(4, 4)
    for ids in tulle.lookahead(data):
        with torch.no_grad():
            model(ids)
    for number, ids in enumerate(tulle.lookahead(data)):
        assert bool(engine_of(model).split_tables._learned.trips) == (number == 3), "two are watched, the next is told"
        step(model, [optimizer], [model(ids)])


@on_ranks(2)
@pytest.mark.parametrize("is_gone_on_one", [False, True])
def test_a_loop_collects_dropped_models_only_where_they_are_gone_on_some_ranks(is_gone_on_one, monkeypatch):
    mesh = tulle.init(data=-1)
    gc.disable()
    model = build("padding", 0)
    tulle.distribute(model, SGD(model.parameters(), lr=0.1), mesh, plan="rows")
    model.itself = [model]
    del model
    if is_gone_on_one and mesh.rank == 1:
        gc.collect()
    looked: list[bool] = []
    monkeypatch.setattr(gc, "collect", lambda: looked.append(True))
    assert len(list(tulle.lookahead(batches(2, 4)))) == 2
    monkeypatch.undo()
    gc.enable()
    assert looked == [True] * is_gone_on_one, "it takes a tenth of a second"


@on_ranks(2)
def test_a_model_that_one_rank_alone_holds_takes_no_part_in_loops():
    mesh = tulle.init(data=-1)
    kept: list[torch.nn.Module] = []
    for _ in range(2):
        model = build("embedding", 0)
        optimizer = SGD(model.parameters(), lr=0.1)
        tulle.distribute(model, optimizer, mesh, plan="rows")
        for ids in tulle.lookahead(batches(4, 4), ids=lambda ids: ids):
            step(model, [optimizer], [model(ids)])
        kept += [model] * (mesh.rank == 0)
        del model, optimizer


@on_ranks(2)
def test_ids_may_be_those_of_tables_of_one_of_several_models():
    mesh = tulle.init(data=-1)
    models = build("embedding", 0), torch.nn.ModuleDict({"users": torch.nn.Embedding(ROWS, 4)})
    optimizers = [SGD(model.parameters(), lr=0.1) for model in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        tulle.distribute(model, optimizer, mesh, plan="rows")
    for ids in tulle.lookahead(batches(3, 4), ids=lambda ids: {"table": ids, "users.weight": ids[:2]}):
        step(models[0], optimizers, [models[0](ids), models[1]["users"](ids[:2]).sum()])
        assert all(engine_of(model).split_tables._ahead.trips for model in models), "each model's rows were told"
