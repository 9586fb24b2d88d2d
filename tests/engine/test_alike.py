"""Replicas that a program parts are told on all ranks by name; what it does alike, or for a while, is left alone."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

import tulle
from raised_alike import every_rank_raises
from ranks import on_ranks
from tulle.errors import ModelError
from tulle.plan import Memory, Plan

Act = Callable[[nn.Module, SGD, int, int], bool]
"""What a program does before a step, by its number and the rank; gives whether to step."""


def model_of(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def train(act: Act, schedule: str = "step", steps: int = 10) -> None:
    mesh, model = tulle.init(data=-1), model_of()
    model, optimizer = tulle.distribute(
        model, SGD(model.parameters(), 0.1), mesh, plan=Plan(mesh.shape, schedule=schedule)
    )
    for step in range(steps):
        model(torch.full((3, 4), 1.0 + step + mesh.rank)).pow(2).mean().backward()
        if act(model, optimizer, step, mesh.rank):
            optimizer.step()
        optimizer.zero_grad()


def loads(model: nn.Module, _: SGD, step: int, rank: int) -> bool:
    if step == rank == 0:
        model.load_state_dict(model_of(1).state_dict())
    return True


def skips(_: nn.Module, __: SGD, step: int, rank: int) -> bool:
    return step != 2 or rank != 1


def draws(model: nn.Module, _: SGD, __: int, rank: int) -> bool:
    for parameter in model.parameters():
        parameter.grad.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(rank)))
    return True


def writes_infinity(model: nn.Module, _: SGD, __: int, rank: int) -> bool:
    if rank == 1:
        model[2].bias.data[0] = float("nan")
    return True


@on_ranks(2, 3)
@pytest.mark.parametrize("schedule", ["step", "read"])
@pytest.mark.parametrize("act", [loads, skips, draws])
def test_what_parts_replicas_is_told_on_all_ranks(act, schedule):
    with every_rank_raises(ModelError, "was not the same on all ranks of axis 'data' at the step after backward"):
        train(act, schedule)


@on_ranks(2)
def test_a_number_that_is_not_finite_on_one_rank_is_told_by_name():
    with every_rank_raises(ModelError, "the parameter '2.bias' was not the same on all ranks of axis 'data'"):
        train(writes_infinity)


@on_ranks(2)
def test_of_a_large_parameter_other_numbers_are_looked_at_each_time():
    mesh, model = tulle.init(data=-1), nn.Linear(512, 512)  # four times as many as are looked at
    model, optimizer = tulle.distribute(model, SGD(model.parameters(), 0.1), mesh)
    with torch.no_grad():
        model.weight.view(-1)[12303] += mesh.rank
    with every_rank_raises(
        ModelError, "'weight' was not the same on all ranks of axis 'data' at the step after backward 2"
    ):
        for _ in range(10):
            model(torch.ones(2, 512)).mean().backward()
            optimizer.step()


@on_ranks(2)
@pytest.mark.parametrize("is_shared", [False, True], ids=["whole", "shared out"])
def test_rates_that_follow_the_loss_of_each_rank_are_told(is_shared):
    mesh, model = tulle.init(data=-1), model_of()
    plan = Plan(mesh.shape, memory=Memory(full_shard=True)) if is_shared else Plan(mesh.shape)
    model, optimizer = tulle.distribute(model, SGD(model.parameters(), 0.1), mesh, plan=plan)
    scheduler = ReduceLROnPlateau(optimizer, patience=0)
    with every_rank_raises(
        ModelError, "with other learning rates (their sum was 0.1 on rank 0, 0.001 on rank 1 of axis"
    ):
        for step in range(10):
            model(torch.ones(3, 4)).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step(float(step if mesh.rank else -step))


def perturbs(model: nn.Module, x: Tensor, rank: int) -> list[Tensor]:
    """Weights a little way off, elsewhere on each rank."""
    kept = [parameter.detach().clone() for parameter in model.parameters()]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01 * (rank + 1) * x.mean())
    return kept


@on_ranks(2)
def test_what_ranks_have_differently_between_steps_is_left_alone():
    mesh, model = tulle.init(data=-1), model_of()
    model, optimizer = tulle.distribute(model, SGD(model.parameters(), 0.1), mesh)
    for step in range(10):
        x = torch.full((3, 4), 1.0 + step + mesh.rank)
        kept = perturbs(model, x, mesh.rank)
        model(x).pow(2).mean().backward()
        with torch.no_grad():
            for parameter, before in zip(model.parameters(), kept, strict=True):
                parameter.copy_(before)
        optimizer.step()
        optimizer.zero_grad()
    theirs = copy.deepcopy(model)
    torch.distributed.broadcast(theirs[0].weight.data, src=0)
    assert torch.equal(theirs[0].weight, model[0].weight)


class Relative(Optimizer):
    """Has no rate but one that it chooses by the number of the step, as Adafactor may."""

    def __init__(self, parameters) -> None:
        super().__init__(parameters, {"lr": None})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for parameter in [p for group in self.param_groups for p in group["params"] if p.grad is not None]:
            self.state[parameter]["step"] = step = self.state[parameter].get("step", 0) + 1
            parameter.add_(parameter.grad, alpha=-0.1 / step)


@on_ranks(2)
def test_an_optimizer_without_a_rate_steps_and_is_profiled():
    mesh, model, reference = tulle.init(data=-1), model_of(), model_of()
    x = torch.arange(24.0).view(6, 4) / 24
    optimizer, alone = Relative(model.parameters()), Relative(reference.parameters())
    assert tulle.profile(model, optimizer, x, mesh).step_s > 0
    model, optimizer = tulle.distribute(model, optimizer, mesh)
    for _ in range(3):
        model(x[mesh.rank :: 2]).pow(2).mean().backward()
        reference(x).pow(2).mean().backward()
        for one in (optimizer, alone):
            one.step()
            one.zero_grad()
    torch.testing.assert_close(model.state_dict(), reference.state_dict())
