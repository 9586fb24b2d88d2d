"""The promise of exactness: on any number of ranks, the loss and the parameters of one process on the whole batch."""

import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import models
import tulle
from gigabit import give_network
from models import Dense, Tied, Words, batches, build, worst_difference
from ranks import on_ranks

STEPS = 5
TOLERANCE = 1e-12
SAMPLES_A_RANK = 4
COMBINATIONS = [
    (Words, models.sgd),
    (Words, models.momentum),
    (Words, models.adagrad),
    (Words, models.sparse_adam_and_adam),
    (Words, models.sparse_adam_and_adamw),
    (Tied, models.sgd),
    (Tied, models.adam),
    (Tied, models.adamw),
    (Tied, models.adagrad),
    (Dense, models.momentum),
    (Dense, models.adamw),
]


def train_alone(kind: Callable[[], nn.Module], recipe: models.Recipe, ranks: int, max_norm: float | None = None):
    """One process on the global batches: the model and its losses."""
    model = build(kind, seed=0)
    optimizers = recipe(model)
    losses = []
    for ids in batches(STEPS, SAMPLES_A_RANK * ranks):
        loss = model(ids)
        loss.backward()
        if max_norm is not None:
            tulle.clip_grad_norm_(model, max_norm)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return model, losses


def mean_over_ranks(value: float, mesh: tulle.Mesh) -> float:
    total = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total)
    return total.item() / mesh.size


def check(model: nn.Module, losses: list[float], reference: nn.Module, expected: list[float]) -> None:
    difference, name = worst_difference(model, reference)
    assert difference < TOLERANCE, f"{name} differs by {difference:.1e}"
    assert losses == pytest.approx(expected, rel=TOLERANCE)


@on_ranks(1, 2, 3, 4)
@pytest.mark.parametrize(("kind", "recipe"), COMBINATIONS, ids=lambda part: part.__name__)
def test_loss_and_parameters_are_those_of_one_process(kind, recipe):
    mesh = tulle.init(data=-1)
    give_network(mesh["data"])
    expected = train_alone(kind, recipe, mesh.size)
    for plan in ["auto", "allgather", "densify"] if kind is Words else ["auto"]:
        model = build(kind, seed=mesh.rank)  # other weights on each rank: rank 0's must win
        model, optimizers = tulle.distribute(model, recipe(model), mesh, plan=plan)
        losses = []
        for ids in batches(STEPS, SAMPLES_A_RANK * mesh.size):
            loss = model(ids.chunk(mesh.size)[mesh.rank])
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            losses.append(mean_over_ranks(loss.item(), mesh))
        check(model, losses, *expected)


@on_ranks(2)
def test_the_comparison_can_fail_where_gradients_are_not_synchronized():
    mesh = tulle.init(data=-1)
    give_network(mesh["data"])
    model, [optimizer] = tulle.distribute(model := build(Words, 0), models.sgd(model), mesh)
    for ids in batches(STEPS, SAMPLES_A_RANK * mesh.size):
        with model.no_sync():
            model(ids.chunk(mesh.size)[mesh.rank]).backward()
        optimizer.step()
        optimizer.zero_grad()
    reference, _ = train_alone(Words, models.sgd, mesh.size)
    assert worst_difference(model, reference)[0] > 1e-4


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("plan", ["allgather", "densify"])
@pytest.mark.parametrize("kind", [Words, Tied, Dense])
@pytest.mark.parametrize("keeps_gradients", [True, False], ids=["zeroed", "none"])
def test_gradient_accumulation_sends_the_sum_once(kind, plan, keeps_gradients):
    mesh = tulle.init(data=-1)
    give_network(mesh["data"])
    model, optimizers = tulle.distribute(model := build(kind, 0), models.sgd(model), mesh, plan=plan)
    losses = []
    for ids in batches(STEPS, SAMPLES_A_RANK * mesh.size):
        *first, last = ids.chunk(mesh.size)[mesh.rank].chunk(4)
        with model.no_sync():
            parts = [model(part) / 4 for part in first]
            for part in parts:
                part.backward()
        parts.append(model(last) / 4)
        parts[-1].backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=not (keeps_gradients and kind is Dense))
        losses.append(mean_over_ranks(sum(part.item() for part in parts), mesh))
    reference, expected = train_alone(kind, models.sgd, mesh.size)
    model.load_state_dict(model.state_dict() | {name: value for name, value in reference.named_buffers()})
    check(model, losses, reference, expected)


@on_ranks(1, 2, 4)
@pytest.mark.parametrize("kind", [Words, Tied])
def test_clipping_sees_the_norm_of_the_whole_batch(kind):
    mesh = tulle.init(data=-1)
    give_network(mesh["data"])
    model, [optimizer] = tulle.distribute(model := build(kind, 0), models.sgd(model), mesh)
    losses = []
    for ids in batches(STEPS, SAMPLES_A_RANK * mesh.size):
        loss = model(ids.chunk(mesh.size)[mesh.rank])
        loss.backward()
        tulle.clip_grad_norm_(model, 0.05)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean_over_ranks(loss.item(), mesh))
    check(model, losses, *train_alone(kind, models.sgd, mesh.size, max_norm=0.05))


@on_ranks(2, 3)
def test_two_backwards_of_one_step_add_up():
    mesh = tulle.init(data=-1)
    give_network(mesh["data"])
    model, [optimizer] = tulle.distribute(model := build(Words, 0), models.sgd(model), mesh)
    reference = build(Words, 0)
    [theirs] = models.sgd(reference)
    for ids in batches(STEPS, SAMPLES_A_RANK * mesh.size):
        mine = ids.chunk(mesh.size)[mesh.rank]
        model(mine).backward()
        (model.out.weight.pow(2).sum() + model.hidden(model.words(mine)).mean()).backward()  # reaches some only
        optimizer.step()
        optimizer.zero_grad()
        reference(ids).backward()
        (reference.out.weight.pow(2).sum() + reference.hidden(reference.words(ids)).mean()).backward()
        theirs.step()
        theirs.zero_grad()
    assert worst_difference(model, reference)[0] < TOLERANCE


@on_ranks(2, 3)
@pytest.mark.parametrize("plan", ["allgather", "densify"])
def test_a_part_that_only_one_rank_uses_gets_the_mean(plan):
    mesh = tulle.init(data=-1)
    give_network(mesh["data"])
    model, [optimizer] = tulle.distribute(model := build(Words, 0), models.momentum(model), mesh, plan=plan)
    reference = build(Words, 0)
    [theirs] = models.momentum(reference)
    ids = batches(1, SAMPLES_A_RANK)[0]
    for step in range(STEPS):
        loss = model(ids)
        expected = reference(ids)
        if step >= 2:  # from the third step on, after buckets are laid out
            expected = expected + (reference.unused(reference.never(ids)).sum() / mesh.size)
            if mesh.rank == mesh.size - 1:
                loss = loss + model.unused(model.never(ids)).sum()
        loss.backward()
        expected.backward()
        assert (model.unused.weight.grad is None) == (reference.unused.weight.grad is None)
        assert (model.never.weight.grad is None) == (reference.never.weight.grad is None)
        optimizer.step()
        theirs.step()
        optimizer.zero_grad()
        theirs.zero_grad()
    assert worst_difference(model, reference)[0] < TOLERANCE


@on_ranks(2)
def test_gradients_keep_the_kind_that_one_process_gives():
    mesh = tulle.init(data=-1)
    give_network(mesh["data"])
    model, _ = tulle.distribute(model := build(Words, 0), models.sgd(model), mesh)
    model(batches(1, 8)[0]).backward()
    assert model.words.weight.grad.layout == torch.sparse_coo
    assert model.words.weight.grad.is_coalesced()
    assert model.hidden.weight.grad.layout == torch.strided
    assert model.never.weight.grad is None
    assert model.unused.weight.grad is None
    assert model.frozen.weight.grad is None


@on_ranks(1, 2)
def test_a_scheduler_and_autocast_work_as_ever():
    mesh = tulle.init(data=-1)
    give_network(mesh["data"])
    torch.manual_seed(0)
    model = Words()
    reference = copy.deepcopy(model)
    optimizer, theirs = models.sgd(model)[0], models.sgd(reference)[0]
    schedulers = [LambdaLR(one, lambda step: 1 / (1 + step)) for one in (optimizer, theirs)]
    model, optimizer = tulle.distribute(model, optimizer, mesh)
    for ids in batches(STEPS, SAMPLES_A_RANK * mesh.size):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss, expected = model(ids.chunk(mesh.size)[mesh.rank]), reference(ids)
        loss.backward()
        expected.backward()
        for one in (optimizer, theirs):
            one.step()
            one.zero_grad()
        for scheduler in schedulers:
            scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 / (1 + STEPS))
    assert worst_difference(model, reference)[0] < 2e-2  # bfloat16 products


@on_ranks(2, 3)
def test_an_embedding_with_max_norm_is_renormalized_alike_on_all_ranks():
    mesh = tulle.init(data=-1)
    give_network(mesh["data"])

    def bounded() -> Words:
        model = Words()
        model.words = nn.Embedding(models.WORDS, models.WIDTH, sparse=True, max_norm=0.8)
        return model

    model, [optimizer] = tulle.distribute(model := build(bounded, 0), models.sgd(model), mesh)
    reference = build(bounded, 0)
    [theirs] = models.sgd(reference)
    for ids in batches(STEPS, SAMPLES_A_RANK * mesh.size):
        model(ids.chunk(mesh.size)[mesh.rank]).backward()
        reference(ids).backward()
        for one in (optimizer, theirs):
            one.step()
            one.zero_grad()
    assert worst_difference(model, reference)[0] < TOLERANCE
