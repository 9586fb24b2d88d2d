"""Modules that a forward copies or makes stay with who does."""

import copy

import torch
from beside_one_process import DTYPE, both
from pipeline_networks import WIDTH
from torch import nn

from ranks import on_ranks


class CopyingOnTheWay(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        frozen = copy.deepcopy(self.layer).requires_grad_(False)
        return self.layer(x).tanh() + frozen(x)


class Copying(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(WIDTH, WIDTH), CopyingOnTheWay(), nn.Linear(WIDTH, WIDTH))


@on_ranks(2)
def test_a_module_that_forward_copies_stays_with_who_copies_it():
    worst, _, _ = both(Copying, None, steps=2, by_profile=True)
    assert worst < 1e-12


class MakingOnTheWay(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return nn.LayerNorm(WIDTH, dtype=DTYPE)(self.layer(x).tanh() + x)


class Making(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(WIDTH, WIDTH), MakingOnTheWay(), nn.Linear(WIDTH, WIDTH), MakingOnTheWay())


@on_ranks(2)
def test_a_module_that_forward_makes_stays_with_who_makes_it():
    worst, _, _ = both(Making, None, steps=2, by_profile=True)
    assert worst < 1e-12


class Magnitude(nn.Module):
    """Is handed a weight, which it turns, as a parameter, as DoRA of an embedding, and of GPT-2, does."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x, weight):
        turned = nn.Parameter(weight.T)
        return x * self.weight / (turned + 0.1 * turned).detach().norm(dim=1)


class Turning(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.magnitude = nn.Linear(WIDTH, WIDTH), Magnitude()

    def forward(self, x):
        scaled = nn.Parameter(2 * self.layer.weight.detach())
        return self.magnitude(self.layer(x), self.layer.weight).tanh() + x @ scaled


class TurningAll(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(WIDTH, WIDTH), Turning(), Turning(), nn.Linear(WIDTH, WIDTH))


@on_ranks(2)
def test_a_parameter_that_forward_makes_of_others_stays_with_who_has_them():
    worst, _, _ = both(TurningAll, None, steps=2, by_profile=True)
    assert worst < 1e-12
