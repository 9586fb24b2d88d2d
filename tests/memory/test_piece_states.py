"""The state of an optimizer that is sharded is not looked for under whole parameters in vain."""

import copy
import pickle

import pytest
import torch
from torch import nn

import tulle
from ranks import on_ranks
from tulle.errors import ModelError
from tulle.memory import shard_optimizer


@on_ranks(2)
def test_who_asks_for_the_state_of_a_parameter_is_told_where_it_is():
    axis = tulle.init(data=-1)["data"]
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    shard_optimizer(optimizer, axis)
    asked = {
        "read": lambda: optimizer.state[model.weight]["momentum_buffer"],
        "get": lambda: optimizer.state.get(model.bias),
        "in": lambda: model.weight in optimizer.state,
        "reset": lambda: optimizer.state.pop(model.weight, None),
        "read or begin": lambda: optimizer.state.setdefault(model.bias, {}),
        "put anew": lambda: optimizer.state.__setitem__(model.weight, {}),
    }
    for _ in range(3):
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        for ask in asked.values():
            with pytest.raises(ModelError, match=r"sharded over the ranks: .* optimizer.state_dict\(\)"):
                ask()
        state = copy.deepcopy(optimizer.state_dict())
        assert state["state"][0]["momentum_buffer"].shape == (2, 3)
        optimizer.load_state_dict(state)


@on_ranks(2)
def test_a_copy_of_an_optimizer_does_not_lose_its_state_in_silence():
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    shard_optimizer(optimizer, tulle.init(data=-1)["data"])
    assert not copy.deepcopy(optimizer).state, "there is nothing to lose before the first step"
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    for write in (copy.deepcopy, pickle.dumps):
        with pytest.raises(ModelError, match=r"copied or pickled, .* have every rank call optimizer.state_dict\(\)"):
            write((model, optimizer))
