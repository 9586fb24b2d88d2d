"""Rows that the next batch wants go first, the others behind its forward and backward: the numbers of one process."""

import gc
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from threading import Event

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, Adagrad, Adam, Optimizer, RMSprop
from torch.optim.lr_scheduler import LambdaLR

import models
import tulle
import tulle.comm.background as background_module
import tulle.engine.returned
import tulle.engine.split_tables
from models import Words, batches, build, difference_of_parts
from rank_process import patches
from ranks import on_ranks
from tulle.comm import traffic
from tulle.engine import engine_of
from tulle.engine.late_tables import LateTable, MeanRows
from tulle.engine.late_tensors import LateParameter, LateShardGradient
from tulle.tables import ShardGradient, split_of

STEPS = 10
SAMPLES = 4
TOLERANCE = 1e-12
TABLES = ("words.weight", "tags.weight")


def dense_words() -> nn.Module:
    return Words(is_sparse=False)


def scheduled(model: nn.Module, optimizers: Sequence[Optimizer], mesh: tulle.Mesh, placement: str = "rows"):
    """The model with its tables split, and delayed rows."""
    patches.setattr(tulle.engine.split_tables, "WORTH_S", 0.0)  # small tables never pay
    plan = tulle.plan(model, optimizers, mesh).with_rows_split(
        {name: (models.WORDS, models.WIDTH) for name in TABLES}, "a test"
    )
    tables = [replace(table, scheme=placement) if table.name in TABLES else table for table in plan.tables]
    plan = replace(plan, tables=tuple(tables), schedule="read")
    return tulle.distribute(model, optimizers, mesh, plan=plan)


def adam(model):
    return [Adam(model.parameters(), lr=0.01, amsgrad=True, weight_decay=0.01)]


def nesterov(model):
    return [SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01)]


def adagrad(model):
    return [Adagrad(model.parameters(), lr=0.1, lr_decay=0.1, initial_accumulator_value=0.1)]


def rmsprop(model):
    return [RMSprop(model.parameters(), lr=0.01, centered=True, momentum=0.5)]


CASES = [(Words, models.sparse_adam_and_adam), (dense_words, adam)]
OTHERS = [
    (Words, models.sgd),
    (Words, models.momentum),
    (dense_words, adagrad),
    (Words, adagrad),
    (dense_words, nesterov),
    (dense_words, rmsprop),
]
SLOW = [pytest.param(*case, marks=pytest.mark.slow) for case in OTHERS]


def pair(kind, recipe, mesh: tulle.Mesh, placement: str = "rows"):
    """Model and optimizers on all ranks, and those of one process."""
    reference, model = build(kind, 0), build(kind, mesh.rank)
    theirs, ours = recipe(reference), recipe(model)
    scheduled(model, ours, mesh, placement)
    return model, ours, reference, theirs


def steps(
    model, ours, reference, theirs, mesh: tulle.Mesh, count: int = STEPS, before_step: Callable[[], None] = list
) -> Iterator[int]:
    """Train both on the same batches: all of a step but `zero_grad` is done when its number comes."""
    data = batches(count, SAMPLES * mesh.size)
    shares = [ids.chunk(mesh.size)[mesh.rank] for ids in data]
    for number, (whole, ids) in enumerate(zip(data, tulle.lookahead(shares), strict=True)):
        for one, optimizers, batch in ((reference, theirs, whole), (model, ours, ids)):
            one(batch).backward()
            if one is model:
                before_step()
            for optimizer in optimizers:
                optimizer.step()
        yield number
        for optimizer in (*ours, *theirs):
            optimizer.zero_grad()


@on_ranks(2)
def test_a_model_that_trains_no_more_does_not_refuse_ids_that_are_none_of_its_own():
    mesh = tulle.init(data=-1)
    patches.setattr(tulle.engine.split_tables, "WORTH_S", 0.0)
    before, after = build(Words, 0), build(Words, 1)
    for model, more in ((before, 0), (after, models.WORDS)):
        if more:
            model.words = nn.Embedding(2 * models.WORDS, models.WIDTH, sparse=True).double()
        optimizer = SGD(model.parameters(), lr=0.1)
        plan = tulle.plan(model, optimizer, mesh)
        shape = (models.WORDS + more, models.WIDTH)
        plan = replace(plan.with_rows_split({"words.weight": shape}, "a test"), schedule="read")
        tulle.distribute(model, optimizer, mesh, plan=plan)
        for ids in tulle.lookahead([ids + more for ids in batches(3, SAMPLES)]):  # the third is told
            model(ids).backward()
            optimizer.step()
            optimizer.zero_grad()


@on_ranks(3)
@pytest.mark.parametrize("placement", ["rows", pytest.param("columns", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("kind", "recipe"), [*CASES, *SLOW], ids=lambda part: part.__name__)
def test_parameters_and_state_are_those_of_one_process(kind, recipe, placement):
    mesh = tulle.init(data=-1)
    both = pair(kind, recipe, mesh, placement)
    late = sum(isinstance(both[0].words.weight, LateParameter) for _ in steps(*both, mesh))
    assert late == STEPS - 4  # three before ids are told, and the last knows of no next
    assert difference_of_parts(*both)[0] < TOLERANCE


@on_ranks(2)
def test_the_comparison_can_fail_where_prior_rows_are_served_as_they_were():
    mesh = tulle.init(data=-1)
    both = pair(Words, models.sparse_adam_and_adam, mesh)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LateTable, "ahead", lambda late, places: LateTable_ahead(late, places) * 0)
        for _ in steps(*both, mesh):
            pass
    assert difference_of_parts(*both)[0] > 1e-6


LateTable_ahead = LateTable.ahead


@on_ranks(2)
def test_the_comparison_can_fail_where_delayed_rows_get_lost():
    mesh = tulle.init(data=-1)
    both = pair(Words, models.sgd, mesh)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MeanRows, "together", lambda prior, delayed: prior)
        for _ in steps(*both, mesh):
            pass
    assert difference_of_parts(*both)[0] > 1e-6


@on_ranks(2)
def test_rows_that_nobody_wants_next_are_not_waited_for_before_the_next_forward():
    mesh = tulle.init(data=-1)
    both = pair(Words, models.sgd, mesh)
    tables = engine_of(both[0]).split_tables
    gate = Event()
    traffic.is_tracing = True
    for number in steps(*both, mesh):
        if number == 4:
            tables._later.background.submit(gate.wait)  # the step's delayed rows are behind this
        if number == 5:  # two steps were done without them
            assert not tables._later.background.submit(lambda: None)._future.done()
            gate.set()
    traffic.is_tracing = False
    pushes = [span.name for span in traffic.take_spans() if span.track == "split tables"]
    assert [pushes.count(f"push: {what} rows") for what in ("prior", "delayed")] == [STEPS - 4] * 2
    assert difference_of_parts(*both)[0] < TOLERANCE


class AllUsed(Words):
    """Its layers' gradients are late: each rank knows without the others that there are some of all."""

    def __init__(self):
        super().__init__()
        del self.unused, self.never


@on_ranks(2)
def test_rows_that_nobody_wants_next_let_gradients_pass_that_the_next_forward_waits_for():
    mesh = tulle.init(data=-1)
    patches.setattr(tulle.engine.returned, "_LONGEST_WAIT_S", 20.0)
    model, *_ = both = pair(AllUsed, models.sgd, mesh)
    tables = engine_of(model).split_tables
    for number in steps(*both, mesh):
        if 4 <= number < STEPS - 1:
            tables.wait()  # the values of the next step are here
            time.sleep(0.05)
            delayed = tables._late_tables[tables.tables["words.weight"].number]._rows.delayed
            assert delayed.is_begun
            assert not delayed.is_over
            assert model.out.weight.isfinite().all()
            tables._later.background.submit(lambda: None).result()
            assert delayed.is_over
    assert difference_of_parts(*both)[0] < TOLERANCE


@on_ranks(2)
def test_where_threads_take_turns_as_on_a_gpu_these_rows_wait_for_nobody_who_waits_for_them():
    mesh = tulle.init(data=-1)
    patches.setattr(tulle.engine.returned, "_LONGEST_WAIT_S", float("inf"))  # to wait so long raises
    model, *_ = both = pair(AllUsed, models.sgd, mesh)
    tables = engine_of(model).split_tables
    tables._later.background._turns = background_module._Turns()
    for number in steps(*both, mesh):
        if 4 <= number < STEPS - 1:
            assert tables._late_tables[tables.tables["words.weight"].number]._rows.delayed.is_over
    assert difference_of_parts(*both)[0] < TOLERANCE


@on_ranks(3)
@pytest.mark.parametrize("what", ["gradient", "parameter", "state"])
def test_what_one_rank_alone_reads_is_true_and_holds_nobody_up(what):
    mesh = tulle.init(data=-1)
    model, ours, reference, theirs = both = pair(dense_words, models.adam, mesh)
    split = split_of(model.words.weight)
    for number in steps(*both, mesh):
        if 4 < number < STEPS - 1 and mesh.rank == number % 3:
            assert isinstance(model.words.weight, LateParameter)
            if what == "parameter":
                torch.testing.assert_close(
                    model.words.weight.to_local(), split.take(reference.words.weight), rtol=0.0, atol=TOLERANCE
                )
            elif what == "state":
                state = ours[0].state_dict()["state"][0]["exp_avg"]
                assert (state - split.take(theirs[0].state[reference.words.weight]["exp_avg"])).abs().max() < TOLERANCE
            else:
                assert isinstance(model.words.weight.grad, LateShardGradient)
                gradient = model.words.weight.grad.detach().as_subclass(torch.Tensor)  # or all would have to ask
                assert (gradient - split.take(reference.words.weight.grad)).abs().max() < TOLERANCE
            assert not isinstance(model.words.weight, LateParameter)
    assert difference_of_parts(*both)[0] < TOLERANCE


@on_ranks(2)
def test_a_gradient_that_one_rank_reads_before_the_step_is_whole_there():
    mesh = tulle.init(data=-1)
    model, _, reference, _ = both = pair(dense_words, models.momentum, mesh)
    found: list[torch.Tensor] = []

    def look() -> None:
        gradient = model.words.weight.grad
        if mesh.rank == 1 and isinstance(gradient, LateShardGradient):
            gradient = gradient.detach().as_subclass(torch.Tensor)  # or all would have to ask
            found.append(gradient - split_of(model.words.weight).take(reference.words.weight.grad))

    for _ in steps(*both, mesh, before_step=look):
        pass
    assert len(found) == (0 if mesh.rank == 0 else STEPS - 4)
    assert all(one.abs().max() < TOLERANCE for one in found)
    assert difference_of_parts(*both)[0] < TOLERANCE


@on_ranks(2)
def test_clipping_a_scheduler_and_another_lookup_see_the_truth():
    mesh = tulle.init(data=-1)
    model, [ours], reference, [theirs] = both = pair(dense_words, models.adam, mesh)
    schedulers = [LambdaLR(one, lambda step: 1 / (1 + step)) for one in (ours, theirs)]
    for one, whose in ((ours, model), (theirs, reference)):
        one.register_step_pre_hook(partial(clip_every_third, whose, count()))
    everything = torch.arange(models.WORDS)
    for number in steps(*both, mesh):
        for scheduler in schedulers:
            scheduler.step()
        if number % 4 == 1:  # rows that no batch announced
            with torch.no_grad():
                assert (model.words(everything) - reference.words(everything)).abs().max() < TOLERANCE
    assert difference_of_parts(*both)[0] < TOLERANCE


def clip_every_third(model: nn.Module, calls: Iterator[int], *_: object) -> None:
    if next(calls) % 3 == 2:
        clip_grad_norm_([p for p in model.parameters() if p.grad is not None], 0.01)


@on_ranks(2)
@pytest.mark.parametrize("sets_to_none", [True, False], ids=["none", "zeroed"])
def test_gradients_that_add_up_and_steps_left_out_are_as_ever(sets_to_none):
    mesh = tulle.init(data=-1)
    model, ours, reference, theirs = both = pair(dense_words, models.adam, mesh)
    data = batches(STEPS, SAMPLES * mesh.size)
    shares = [ids.chunk(mesh.size)[mesh.rank] for ids in data]
    for number, (whole, ids) in enumerate(zip(data, tulle.lookahead(shares), strict=True)):
        for one, [optimizer], batch in ((reference, theirs, whole), (model, ours, ids)):
            one(batch).backward()
            if number % 3 != 2:  # else the gradient stays for the next step
                optimizer.step()
                optimizer.zero_grad(set_to_none=sets_to_none)
    assert difference_of_parts(*both)[0] < TOLERANCE


@on_ranks(2)
def test_gradients_that_are_dropped_leave_nothing_behind():
    mesh = tulle.init(data=-1)
    model, ours, reference, theirs = both = pair(dense_words, models.adam, mesh)
    data = batches(STEPS, SAMPLES * mesh.size)
    shares = [ids.chunk(mesh.size)[mesh.rank] for ids in data]
    late = engine_of(model).late
    for number, (whole, ids) in enumerate(zip(data, tulle.lookahead(shares), strict=True)):
        for one, [optimizer], batch in ((reference, theirs, whole), (model, ours, ids)):
            one(batch).backward()
            if number % 2:
                optimizer.step()
            optimizer.zero_grad()
        assert sum(isinstance(one, LateTable) for one in late._waiting) <= 2 * len(TABLES)
    assert difference_of_parts(*both)[0] < TOLERANCE


@on_ranks(2)
def test_a_loop_that_is_left_and_one_that_follows_know_what_waits():
    mesh = tulle.init(data=-1)
    both = pair(Words, models.sparse_adam_and_adam, mesh)
    for number in steps(*both, mesh):
        if number == 5:
            break
    for optimizer in (*both[1], *both[3]):
        optimizer.zero_grad()
    for _ in steps(*both, mesh, 4):
        pass
    assert difference_of_parts(*both)[0] < TOLERANCE


@on_ranks(2)
def test_delayed_rows_that_nobody_reads_hold_no_model_and_a_gradient_that_is_kept_is_true():
    mesh = tulle.init(data=-1)
    model, ours, reference, theirs = pair(dense_words, models.adam, mesh)
    for number in steps(model, ours, reference, theirs, mesh):
        if number == 5:
            break
    gradient, split = model.words.weight.grad, split_of(model.words.weight)
    assert isinstance(gradient, LateShardGradient)
    held = [weakref.ref(parameter) for parameter in model.parameters()]
    del model, ours
    for _ in range(200):  # the background thread may have the next batch's rows under way
        gc.collect()
        if all(parameter() is None for parameter in held):
            break
        time.sleep(0.01)
    assert [parameter() for parameter in held] == [None] * len(held)
    assert isinstance(gradient, LateShardGradient)
    assert (gradient - split.take(reference.words.weight.grad)).abs().max() < TOLERANCE


@on_ranks(2)
@pytest.mark.parametrize("schedule", ["step", "read"])
def test_to_optimizers_gradients_of_parts_are_plain(schedule):
    mesh = tulle.init(data=-1)
    model = build(Words, 0)
    [optimizer] = models.sgd(model)
    tables = {name: (models.WORDS, models.WIDTH) for name in TABLES}
    plan = replace(tulle.plan(model, optimizer, mesh).with_rows_split(tables, "a test"), schedule=schedule)
    model, optimizer = tulle.distribute(model, optimizer, mesh, plan=plan)
    seen: list[type] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(type(model.words.weight.grad)))
    module = sys.modules[SGD.__module__]
    step_of_torch = vars(module)["sgd"]

    def noted(parameters, gradients, *rest, **options):
        seen.extend(type(g) for p, g in zip(parameters, gradients, strict=True) if p is model.words.weight)
        step_of_torch(parameters, gradients, *rest, **options)

    patches.setattr(module, "sgd", noted)
    for ids in batches(3, SAMPLES):
        model(ids).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert seen[2:] == [ShardGradient, torch.Tensor] * 2  # in the first step a hook comes after ours
