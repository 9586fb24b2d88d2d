"""Hooks of a gradient of which a rank has a part see norms of the whole, and are refused what goes by place."""

import copy

import pytest
import torch
from sharded_plans import FULL
from torch import nn

import tulle
from ranks import on_ranks
from tulle.errors import GradientError
from tulle.plan import Plan


def normalized(gradient):
    return gradient / (1 + gradient.norm())


def clipped_by_norm(parameter):
    parameter.grad.mul_(1 / (1 + parameter.grad.pow(2).sum()))


def without_the_first_row(gradient):
    gradient = gradient.clone()
    gradient[0] = 0
    return gradient


def hooked(model, hook):
    for parameter in model.parameters():
        if hook is clipped_by_norm:
            parameter.register_post_accumulate_grad_hook(hook)
        else:
            parameter.register_hook(hook)


def built():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 4)).double()


def plan_of(how, mesh):
    return Plan(mesh.shape, memory=FULL) if how == "data" else Plan(mesh.shape, tensor_parallel=("0", "2"))


@pytest.mark.parametrize("is_before", [True, False], ids=["put on before", "put on after"])
@pytest.mark.parametrize("hook", [normalized, clipped_by_norm])
@pytest.mark.parametrize("how", ["data", "model"])
@on_ranks(2)
def test_norms_in_them_are_those_of_the_whole(how, hook, is_before):
    mesh, model = tulle.init(**{how: -1}), built()
    expected = copy.deepcopy(model)
    hooked(expected, hook)
    if is_before:
        hooked(model, hook)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9) for one in (model, expected)]
    tulle.distribute(model, optimizers[0], mesh, plan=plan_of(how, mesh))
    if not is_before:
        hooked(model, hook)
    for step in range(3):
        batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(step)).double()
        for one, optimizer in zip((model, expected), optimizers, strict=True):
            one(batch).pow(2).mean().backward()  # the same on all ranks: the mean is each rank's
            optimizer.step()
            optimizer.zero_grad()
    for name, value in tulle.full_state_dict(model, everywhere=True).items():
        torch.testing.assert_close(value, expected.state_dict()[name].cpu(), rtol=1e-12, atol=1e-14)


@on_ranks(2)
def test_a_hook_that_goes_by_place_is_refused_by_name():
    mesh, model = tulle.init(data=-1), built()
    hooked(model, without_the_first_row)
    tulle.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), mesh, plan=Plan(mesh.shape, memory=FULL))
    with pytest.raises(GradientError, match=r"^__setitem__ was asked of a gradient along dimension 0, of which this"):
        model(torch.ones(2, 8).double()).sum().backward()


@on_ranks(2)
def test_a_hook_that_is_taken_away_is_gone():
    mesh, model, calls = tulle.init(data=-1), built(), []
    early = model[0].weight.register_hook(lambda gradient: calls.append("early"))
    tulle.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), mesh, plan=Plan(mesh.shape, memory=FULL))
    late = model[0].weight.register_hook(lambda gradient: calls.append("late"))
    model(torch.ones(2, 8).double()).sum().backward()
    early.remove(), late.remove()
    model(torch.ones(2, 8).double()).sum().backward()
    assert calls == ["early", "late"]
