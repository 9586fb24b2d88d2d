"""An optimizer whose state is sharded may be given closures, as Lightning takes every step."""

import pytest
import torch
from odd_network import OPTIMIZERS, STEPS, difference, make, train
from torch import nn

import tulle
from ranks import on_ranks
from tulle.errors import ModelError
from tulle.memory import shard_optimizer


def with_closures(model, optimizer, axis=None):
    """The losses that steps returned."""
    rank, size = (axis.rank, axis.size) if axis else (0, 1)
    losses = []
    for step in range(STEPS):

        def closure(step=step):
            optimizer.zero_grad()
            loss = model(step, rank, size)
            loss.backward()
            return loss

        losses.append(optimizer.step(closure) if step % 2 else optimizer.step(closure=closure))
    return torch.stack(losses).detach()


@on_ranks(3)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_with_a_closure_is_that_of_one_process(name):
    mesh = tulle.init(data=-1)
    reference, expected = make(name)
    losses = with_closures(reference, expected)
    model, optimizer = tulle.distribute(*make(name), mesh)
    shard_optimizer(optimizer, mesh["data"])
    found = tulle.sync.all_reduce(with_closures(model, optimizer, mesh["data"]), mesh["data"])
    assert difference(found, losses) < 1e-12
    assert difference(dict(model.state_dict()), dict(reference.state_dict())) < 1e-12
    assert difference(optimizer.state_dict(), expected.state_dict()) < 1e-12


@on_ranks(2)
def test_a_closure_that_fails_leaves_all_as_it_was():
    mesh = tulle.init(data=-1)
    model, optimizer = tulle.distribute(*make("AdamW"), mesh)
    shard_optimizer(optimizer, mesh["data"])
    with pytest.raises(ZeroDivisionError):
        optimizer.step(lambda: 1 / 0)
    train(model, optimizer, mesh["data"])
    reference, expected = make("AdamW")
    train(reference, expected)
    assert difference(dict(model.state_dict()), dict(reference.state_dict())) < 1e-12


class Twice(torch.optim.SGD):
    """One that looks at the loss again after its step."""

    def step(self, closure):
        closure()
        super().step()
        return closure()


@on_ranks(2)
def test_a_closure_that_is_called_again_within_the_step_is_refused():
    mesh = tulle.init(data=-1)
    model = nn.Linear(2, 2)
    model, optimizer = tulle.distribute(model, Twice(model.parameters(), lr=0.1), mesh)
    shard_optimizer(optimizer, mesh["data"], elementwise=True)
    with pytest.raises(ModelError, match="called its closure a second time"):
        optimizer.step(lambda: model(torch.ones(1, 2)).sum().backward())
