"""A model that nobody holds any more is gone, and so are the threads of its process groups."""

import gc
from weakref import ref

import pytest
from axes_models import batch_of, distributed, train, train_step

from ranks import on_ranks
from tulle.plan import Memory, Plan, TablePlan

ROWS = Plan({"data": 2}, tables=(TablePlan("words.weight", 40, 8, "rows", "a test"),))


def replicas():
    model, several, place = distributed("words", {"data": 2}, plan=Plan({"data": 2}))
    train(model, several, *place)
    return model, place


def rows():
    model, several, place = distributed("words", {"data": 2}, plan=ROWS)
    train(model, several, *place)
    return model, place


def shared_out():
    model, several, place = distributed("stack", {"data": 2}, plan=Plan({"data": 2}, memory=Memory(full_shard=True)))
    train(model, several, *place)
    return model, place


def states_shared_out():
    memory = Memory(shard_optimizer=True)
    model, several, place = distributed("stack", {"data": 2}, plan=Plan({"data": 2}, memory=memory))
    train(model, several, *place)
    return model, place


def layers_split():
    model, several, place = distributed("stack", {"model": 2}, plan=Plan({"model": 2}))
    train(model, several, *place)
    return model, place


def stages():
    model, several, place = distributed("words", {"pipe": 2})
    train(model, several, *place)
    return model, place


def left_of(held):
    for _ in range(3):  # a graph that has gone with a model has held others
        gc.collect()
    return [name for name, parameter in held.items() if parameter() is not None]


WAYS = [replicas, rows, shared_out, states_shared_out, layers_split, stages]


@on_ranks(2)
@pytest.mark.parametrize("make", WAYS, ids=lambda make: make.__name__)
def test_what_nobody_holds_is_gone(make):
    model, _ = make()
    held = {name: ref(parameter) for name, parameter in model.named_parameters()}
    del model
    assert left_of(held) == []


@on_ranks(2)
@pytest.mark.parametrize("make", WAYS, ids=lambda make: make.__name__)
def test_gradients_that_are_left_hold_nobody(make):
    model, place = make()
    train_step(model, batch_of(9, *place))
    assert any(parameter.grad is not None for parameter in model.parameters())
    held = {name: ref(parameter) for name, parameter in model.named_parameters()}
    del model
    assert left_of(held) == []


@on_ranks(2)
@pytest.mark.parametrize("make", WAYS[:-1], ids=lambda make: make.__name__)
def test_a_model_that_keeps_its_last_output_is_gone(make):
    model, place = make()
    model.last = model(batch_of(9, *place))
    held = {name: ref(parameter) for name, parameter in model.named_parameters()}
    del model
    assert left_of(held) == []
