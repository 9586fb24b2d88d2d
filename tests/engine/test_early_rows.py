"""Rows that stay as they are come before the others, if the next batch wants them: the numbers of one process."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.optim import Adagrad

import models
import tulle
import tulle.engine.split_tables
from models import Words, batches, build, difference_of_parts
from rank_process import patches
from ranks import on_ranks
from tulle.tables import early

STEPS = 12
SAMPLES = 2
TOLERANCE = 1e-12
TABLES = ("words.weight", "tags.weight")


def dense_words():
    return Words(is_sparse=False)


def adagrad_slowing_down(model):
    return [Adagrad(model.parameters(), lr=0.1, lr_decay=0.1)]


class Seen:
    """How many rows of this rank came early and late, and how often that was in vain."""

    def __init__(self) -> None:
        self.early = self.late = self.in_vain = 0
        patches.setattr(tulle.engine.split_tables, "EARLY_S", 0.0)  # small tables never pay
        patches.setattr(tulle.engine.split_tables, "_BITS_IF_CHECKED", 0)
        patches.setattr(tulle.engine.trips, "fetch_rest", self.fetch_rest)

    def fetch_rest(self, come, served, axis, *, stays):
        found = early.fetch_rest(come, served, axis, stays=stays)
        self.in_vain += found is None
        self.early += sum(len(one.values) for one in come)
        self.late += sum(one.division.in_both.rows for one in come)
        return found


def train(kind, recipe, placement: str = "rows", after_step=id, each: int = 1) -> tuple[Seen, float]:
    """Some steps on all ranks and in one process: what was seen, and the largest difference of parameters and state."""
    mesh, seen = tulle.init(data=-1), Seen()
    reference, model = build(kind, 0), build(kind, mesh.rank)
    theirs, ours = recipe(reference), recipe(model)
    shapes = {name: (models.WORDS, models.WIDTH) for name in TABLES}
    plan = tulle.plan(model, ours, mesh).with_rows_split(shapes, "a test")
    tables = [replace(table, scheme=placement) if table.name in TABLES else table for table in plan.tables]
    tulle.distribute(model, ours, mesh, plan=replace(plan, tables=tuple(tables)))
    data = batches(STEPS, SAMPLES * mesh.size)
    shares = [ids.chunk(mesh.size)[mesh.rank] for ids in data]
    for number, (whole, ids) in enumerate(zip(data, tulle.lookahead(shares), strict=True), start=1):
        for one, optimizers, batch in ((reference, theirs, whole), (model, ours, ids)):
            one(batch).backward()
            for optimizer in optimizers if number % each == 0 else ():
                optimizer.step()
                optimizer.zero_grad()
            with torch.no_grad():
                after_step(one)
    return seen, difference_of_parts(model, ours, reference, theirs)[0]


@on_ranks(3)
@pytest.mark.parametrize("placement", ["rows", "columns"])
@pytest.mark.parametrize(
    "recipe", [models.sgd, models.sparse_adam_and_adam, adagrad_slowing_down], ids=lambda recipe: recipe.__name__
)
def test_rows_that_nobody_looks_up_come_early_where_optimizers_leave_them_alone(recipe, placement):
    seen, difference = train(Words, recipe, placement)
    assert seen.early > 0
    assert seen.late > 0
    assert seen.in_vain == 0
    assert difference < TOLERANCE


@on_ranks(2)
def test_gradients_may_add_up_over_several_batches():
    seen, difference = train(Words, models.sparse_adam_and_adam, each=3)
    assert seen.early > 0
    assert seen.in_vain == 0
    assert difference < TOLERANCE


@on_ranks(2)
@pytest.mark.parametrize(("kind", "recipe"), [(dense_words, models.adam), (Words, models.momentum)])
def test_where_optimizers_move_all_rows_they_are_fetched_anew_and_soon_no_more_before(kind, recipe):
    seen, difference = train(kind, recipe)
    assert seen.in_vain == 4  # three, and one that had begun by then
    assert difference < TOLERANCE


def clamped(model) -> None:
    model.words.weight.clamp_(-0.5, 0.5)


def written_once(model) -> None:
    count = model.__dict__["count"] = model.__dict__.get("count", 0) + 1
    if count == STEPS - 3:
        model.words.weight.mul_(0.5)


@on_ranks(2)
@pytest.mark.parametrize("write", [clamped, written_once])
def test_what_is_written_between_steps_is_fetched_anew(write):
    seen, difference = train(Words, models.sgd, after_step=write)
    assert seen.early > 0
    assert difference < TOLERANCE


@on_ranks(2)
def test_the_comparison_can_fail_where_owners_do_not_look():
    patches.setattr(early.Early, "is_as_served", lambda one, now: True)
    seen, difference = train(dense_words, models.adam)
    assert seen.in_vain == 0
    assert difference > 1e-6


@on_ranks(2)
def test_early_rows_of_a_step_that_is_left_out_are_let_go():
    mesh, seen = tulle.init(data=-1), Seen()
    model = build(Words, 0)
    [optimizer] = models.sgd(model)
    shapes = {name: (models.WORDS, models.WIDTH) for name in TABLES}
    plan = tulle.plan(model, optimizer, mesh).with_rows_split(shapes, "a test")
    tulle.distribute(model, optimizer, mesh, plan=plan)
    first = []

    def step(ids: Tensor) -> None:
        model(ids).backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        for number, ids in enumerate(tulle.lookahead(batches(9, SAMPLES))):
            if number == 7:
                break
            step(ids)
        first.append(seen.early)
    assert 0 < first[0] < first[1] < first[2]
