"""A module that runs again in backward draws the same numbers, whatever from, and the loop others afterwards."""

import random

import numpy as np
import pytest
import torch
from torch import nn

from tulle.memory import again, recompute

DRAWS = {
    "torch": lambda block: torch.rand(()).item(),
    "python": lambda block: random.random(),
    "numpy": lambda block: np.random.rand(),
    "normal numbers of numpy": lambda block: np.random.randn(),
    "a generator of torch": lambda block: torch.rand((), generator=block.own[0]).item(),
    "a generator of numpy": lambda block: block.newer.random(),
    "one of the older ones": lambda block: block.older.rand(),
    "one of python": lambda block: block.python.random(),
}


class Scaling(nn.Module):
    """Scales by a number that is drawn."""

    def __init__(self, kind):
        super().__init__()
        self.linear, self.kind, self.own = nn.Linear(4, 4), kind, []
        self.newer, self.older = np.random.default_rng(1), np.random.RandomState(2)
        self.python = random.Random(3)

    def forward(self, x, generator):
        self.own = [generator]
        return self.linear(x * DRAWS[self.kind](self))


def trained(kind, *, recomputed):
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    generator, layers = torch.Generator().manual_seed(4), nn.ModuleList(Scaling(kind) for _ in range(2))
    recompute(layers, ["0", "1"] if recomputed else [])
    for _ in range(2):
        x = torch.ones(2, 4)
        for layer in layers:
            x = layer(x, generator=generator)
        x.sin().sum().backward()
    then = [random.random(), np.random.rand(), torch.rand(()).item(), torch.rand((), generator=generator).item()]
    then += [one for layer in layers for one in (layer.newer.random(), layer.older.rand(), layer.python.random())]
    return [layer.linear.weight.grad for layer in layers], then


@pytest.mark.parametrize("kind", DRAWS)
def test_the_numbers_are_those_of_a_module_that_runs_once(kind):
    gradients, then = trained(kind, recomputed=True)
    expected, then_expected = trained(kind, recomputed=False)
    assert all(map(torch.equal, gradients, expected))
    assert then == then_expected


def test_the_twin_that_puts_none_back_is_found(monkeypatch):
    monkeypatch.setattr(again.Draws, "look", lambda self: setattr(self, "_before", []))
    gradients, then = trained("python", recomputed=True)
    expected, then_expected = trained("python", recomputed=False)
    assert not all(map(torch.equal, gradients, expected))
    assert then != then_expected
