"""Collectives of the user's own in a step: refused where a rank would wait alone; micro-batches meet their own."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn
from pipeline_networks import WIDTH
from torch import nn
from torch.distributed._functional_collectives import all_reduce as functional

import tulle
from ranks import on_ranks
from tulle import pipeline
from tulle.errors import CommunicationError, ModelError


class Sums(nn.Linear):
    """Has a sum over all ranks of its own, as codebooks have."""

    def forward(self, x):
        y = super().forward(x)
        total = y.detach().sum()
        dist.all_reduce(total)
        return y + total


class Two(nn.Module):
    """A layer and another one, and what is done with the first one's result."""

    def __init__(self, second=nn.Linear, between=None):
        super().__init__()
        self.first, self.second, self.between = nn.Linear(WIDTH, WIDTH), second(WIDTH, WIDTH), between

    def forward(self, x):
        y = self.second(self.first(x))
        return y if self.between is None else self.between(y)


def placed(model, axis):
    pipeline.place(model, axis, {"first": 0, "second": 1})
    return pipeline.step(micro_batches=2)(loss_of), torch.ones(4, WIDTH)


def loss_of(model, x):
    loss = model(x).pow(2).mean()
    loss.backward()
    return loss


def in_place(y):
    dist.all_reduce(y.detach())
    return y


def functionally(y):
    return functional(y, "sum", dist.group.WORLD)


@on_ranks(2)
@pytest.mark.filterwarnings("ignore:torch.distributed.nn:FutureWarning")
@pytest.mark.parametrize("between", [in_place, torch.distributed.nn.all_reduce, functionally])
def test_a_collective_on_what_lives_at_one_stage_is_refused_on_all_ranks(between):
    model = Two(between=between)
    step, x = placed(model, tulle.init(pipe=2)["pipe"])
    with pytest.raises(ModelError, match=r"called between modules of a pipeline .* lives at one stage.*losses\.mean"):
        step(model, x)


@on_ranks(2)
def test_a_collective_in_a_placed_module_is_refused_before_its_rank_waits_for_the_others():
    mesh, model = tulle.init(pipe=2), Two(Sums)
    step, x = placed(model, mesh["pipe"])
    with pytest.raises(
        (ModelError, CommunicationError), match=r"'second' calls all_reduce\(\).*one rank alone runs it"
    ):
        step(model, x)


@on_ranks(2)
def test_a_collective_over_ranks_that_all_run_it_is_the_users_own():
    mesh = tulle.init(data=1, pipe=2)
    group = mesh["data"].group

    def between(y):
        total = y.detach().sum()
        dist.all_reduce(total, group=group)
        return y + total

    model = Two(between=between)
    step, x = placed(model, mesh["pipe"])
    assert step(model, x).stack().isfinite().all()


class Meets(Two):
    """Adds numbers of the batch, which all ranks have, over the ranks; between them it waits for a value."""

    def forward(self, x):
        before, after = x[0, 0].clone(), 100 * x[0, 0]
        dist.all_reduce(before)
        y = super().forward(x)
        y.sum().item()
        dist.all_reduce(after)
        return y * 0 + before + after


@on_ranks(2)
def test_micro_batches_meet_their_own_in_collectives_between_modules():
    model = Meets()
    pipeline.place(model, tulle.init(pipe=2)["pipe"], {"first": 0, "second": 1})
    step = pipeline.step(micro_batches=4)(means)
    x = torch.arange(1.0, 5.0).unsqueeze(1).expand(4, WIDTH)
    for _ in range(4):
        assert step(model, x).stack().tolist() == [202.0, 404.0, 606.0, 808.0]


def means(model, x):
    loss = model(x).mean()
    loss.backward()
    return loss
