"""What loops do to an optimizer's state between steps, where updates wait, gives the numbers of one process."""

import copy
import pickle
from collections import defaultdict
from collections.abc import Callable

import pytest
import torch
from late_networks import late_names
from torch import nn
from torch.optim import SGD, Adam, Optimizer

import tulle
from ranks import on_ranks
from tulle.plan import Plan

Change = Callable[[Optimizer], None]


def put_anew(optimizer: Optimizer) -> None:
    optimizer.state = defaultdict(dict)


def clear(optimizer: Optimizer) -> None:
    optimizer.state.clear()


def zero(optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            for value in optimizer.state[parameter].values():
                value.zero_()


def drop_one(optimizer: Optimizer) -> None:
    first = optimizer.param_groups[0]["params"][0]
    assert first in optimizer.state
    assert optimizer.state.pop(first) is not None
    assert optimizer.state.get(first) is None


def zero_what_is_or_begin(optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            for value in optimizer.state.setdefault(parameter, {}).values():
                value.zero_()


def begin_anew(optimizer: Optimizer) -> None:
    optimizer.state.update({parameter: {} for group in optimizer.param_groups for parameter in group["params"]})


def merge(optimizer: Optimizer) -> None:
    optimizer.state |= {parameter: {} for group in optimizer.param_groups for parameter in group["params"]}


def drop_by_pairs(optimizer: Optimizer) -> None:
    for _ in range(4):
        optimizer.state.popitem()


def scale_all(optimizer: Optimizer) -> None:
    for state in optimizer.state.values():
        for value in state.values():
            value.mul_(0.5)


def trained(change: Change, kind: Callable[..., Optimizer], mesh: tulle.Mesh | None) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8)).double()
    optimizer = kind(model.parameters())
    if mesh is not None:
        model, optimizer = tulle.distribute(model, optimizer, mesh, plan=Plan(mesh.shape, schedule="read"))
    for step in range(5):
        x = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        model(x.chunk(mesh.size)[mesh.rank] if mesh else x).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 0:
            assert len(optimizer.state) == 4, "each parameter has been stepped"
        if step == 2:
            assert mesh is None or late_names(model)
            change(optimizer)
    return model


def momentum(parameters):
    return SGD(parameters, 0.1, momentum=0.9)


def adam(parameters):
    return Adam(parameters, 0.01)


@on_ranks(2)
@pytest.mark.parametrize("kind", [momentum, adam])
@pytest.mark.parametrize(
    "change",
    [put_anew, clear, zero, drop_one, drop_by_pairs, zero_what_is_or_begin, begin_anew, merge, scale_all],
)
def test_a_state_that_is_read_or_changed_is_that_of_one_process(change, kind):
    model, reference = trained(change, kind, tulle.init(data=-1)), trained(change, kind, None)
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-12, atol=1e-12)


def copied(optimizer: Optimizer) -> None:
    for state in (
        copy.copy(optimizer.state),
        copy.deepcopy(optimizer.state),
        pickle.loads(pickle.dumps(optimizer.state)),
        optimizer.state | {},
        {} | optimizer.state,
    ):
        assert type(state) in (defaultdict, dict)
        assert len(state) == 4


@on_ranks(2)
def test_copies_and_pickles_of_a_state_are_plain():
    trained(copied, momentum, tulle.init(data=-1))
