"""A step of a sharded optimizer that fails, on all ranks or on one, leaves all as one process would have it."""

import copy
import sys

import pytest
import torch
from odd_network import difference, make, train

import tulle
from ranks import on_ranks
from tulle.errors import GradientError
from tulle.memory import shard_optimizer


def fail_in_the_second_group(model, optimizer, place):
    """A step of which the first group is done."""
    calls, module = [], sys.modules[torch.optim.SGD.__module__]
    step = vars(module)["sgd"]

    def failing(*arguments, **keywords):
        calls.append(len(calls))
        if len(calls) == 2:
            raise RuntimeError("out of memory, say")
        step(*arguments, **keywords)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "sgd", failing)
        with pytest.raises(RuntimeError, match="out of memory"):
            train(model, optimizer, place, steps=[1])
    optimizer.zero_grad()


@on_ranks(3)
def test_after_a_step_that_failed_in_the_middle_training_goes_on_as_in_one_process():
    mesh = tulle.init(data=-1)
    reference, expected = make("SGD momentum")
    model, optimizer = tulle.distribute(*make("SGD momentum"), mesh)
    shard_optimizer(optimizer, mesh["data"])
    for trained, stepped, place in ((reference, expected, None), (model, optimizer, mesh["data"])):
        train(trained, stepped, place, steps=[0])
        fail_in_the_second_group(trained, stepped, place)
    train(reference, expected, steps=[2, 3])
    train(model, optimizer, mesh["data"], steps=[2, 3])
    assert difference(dict(model.state_dict()), dict(reference.state_dict())) < 1e-12


@on_ranks(2)
def test_a_graph_of_before_a_step_is_refused_after_it_as_in_one_process():
    mesh = tulle.init(data=-1)
    model, optimizer = tulle.distribute(*make("SGD"), mesh)
    shard_optimizer(optimizer, mesh["data"])
    loss = model(0, mesh.rank, mesh.size)
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@on_ranks(3)
def test_a_step_that_fails_on_one_rank_fails_on_all_at_once():
    mesh = tulle.init(data=-1)
    model, optimizer = tulle.distribute(*make("SGD momentum"), mesh)
    shard_optimizer(optimizer, mesh["data"])
    train(model, optimizer, mesh["data"], steps=[0])
    if mesh.rank == 1:
        fail_in_the_second_group(model, optimizer, mesh["data"])
    else:
        with pytest.raises(GradientError, match=r"the step of SGD failed on rank 1 of axis 'data', whose own error"):
            train(model, optimizer, mesh["data"], steps=[1])
        optimizer.zero_grad()
    told = tulle.comm.gather_values(dict(model.state_dict()), mesh["data"], label="a test")
    assert all(difference(theirs, told[0]) == 0.0 for theirs in told)
    train(model, optimizer, mesh["data"], steps=[2])


@on_ranks(2)
def test_after_a_step_that_is_refused_gradients_are_zeroed_and_the_state_is_that_of_one_process():
    def refuse(*_):
        raise FloatingPointError("not finite, say")

    def train_past(model, optimizer, place=None):
        train(model, optimizer, place, steps=[0])
        hook = optimizer.register_step_pre_hook(refuse)
        with pytest.raises(FloatingPointError):
            train(model, optimizer, place, steps=[1])
        hook.remove()
        state = copy.deepcopy(optimizer.state_dict())
        optimizer.zero_grad()
        train(model, optimizer, place, steps=[2])
        return dict(model.state_dict()) | state["state"]

    mesh = tulle.init(data=-1)
    model, optimizer = tulle.distribute(*make("Adam"), mesh)
    shard_optimizer(optimizer, mesh["data"])
    assert difference(train_past(model, optimizer, mesh["data"]), train_past(*make("Adam"))) < 1e-12
