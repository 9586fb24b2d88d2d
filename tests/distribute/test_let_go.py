"""A model that nobody holds any more is gone, and so are the threads of its process groups."""

import gc
import time
from weakref import ref

import pytest
import torch.distributed as dist
from axes_models import batch_of, distributed, train, train_step

import tulle
from ranks import on_ranks
from tulle.plan import Memory, Plan, TablePlan

ROWS = TablePlan("words.weight", 40, 8, "rows", "a test")
WAYS = {
    "replicas": ("words", {"data": 2}, Plan({"data": 2})),
    "rows": ("words", {"data": 2}, Plan({"data": 2}, tables=(ROWS,))),
    "shared_out": ("stack", {"data": 2}, Plan({"data": 2}, memory=Memory(full_shard=True))),
    "states_shared_out": ("stack", {"data": 2}, Plan({"data": 2}, memory=Memory(shard_optimizer=True))),
    "layers_split": ("stack", {"model": 2}, Plan({"model": 2})),
    "stages": ("words", {"pipe": 2}, {}),
}


def trained(way):
    kind, shape, plan = WAYS[way]
    model, several, place = distributed(kind, shape, plan=plan)
    train(model, several, *place)
    return model, place


def left_of(held):
    for _ in range(3):  # a graph that has gone with a model has held others
        time.sleep(0.02)  # a thread that has just told what it found lets go of the work itself
        gc.collect()
    return [name for name, parameter in held.items() if parameter() is not None]


@on_ranks(2)
@pytest.mark.parametrize("way", WAYS)
def test_what_nobody_holds_is_gone(way):
    model, _ = trained(way)
    held = {name: ref(parameter) for name, parameter in model.named_parameters()}
    del model
    assert left_of(held) == []


@on_ranks(2)
@pytest.mark.parametrize("way", WAYS)
def test_gradients_that_are_left_hold_nobody(way):
    model, place = trained(way)
    train_step(model, batch_of(9, *place))
    assert any(parameter.grad is not None for parameter in model.parameters())
    held = {name: ref(parameter) for name, parameter in model.named_parameters()}
    del model
    assert left_of(held) == []


@on_ranks(2)
@pytest.mark.parametrize("way", [way for way in WAYS if way != "stages"])
def test_a_model_that_keeps_its_last_output_is_gone(way):
    model, place = trained(way)
    model.last = model(batch_of(9, *place))
    held = {name: ref(parameter) for name, parameter in model.named_parameters()}
    del model
    assert left_of(held) == []


@on_ranks(2)
@pytest.mark.parametrize("way", WAYS)
def test_process_groups_that_were_destroyed_are_gone(way):
    model, place = trained(way)
    for batch in tulle.lookahead([batch_of(turn, *place) for turn in range(3)]):
        train_step(model, batch)
    groups = {name: ref(group) for group, name in dist.distributed_c10d._world.pg_names.items()}
    del model, place
    dist.destroy_process_group()
    assert left_of(groups) == []


@on_ranks(4)
def test_groups_of_stages_that_are_shared_out_are_gone():
    kind, shape = "words", {"data": 2, "pipe": 2}
    model, several, place = distributed(kind, shape, plan=Plan(shape, stages={}, memory=Memory(full_shard=True)))
    train(model, several, *place)
    groups = {name: ref(group) for group, name in dist.distributed_c10d._world.pg_names.items()}
    del model, several, place
    dist.destroy_process_group()
    assert left_of(groups) == []
