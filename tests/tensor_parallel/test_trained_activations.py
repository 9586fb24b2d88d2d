"""Activations that are trained, between layers that are split together."""

import pytest
import torch
from split_training import check_exact, numbers, split, square
from torch import nn

from ranks import on_ranks

WIDTH, INNER = 8, 12


class Slope(nn.Module):
    """A feed-forward network whose activation has one slope."""

    def __init__(self, activation=None):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        self.activation = activation or nn.PReLU()

    def forward(self, x):
        return x + self.down(self.activation(self.up(x)))


class Slopes(Slope):
    """One for each place of a sequence."""

    def __init__(self):
        super().__init__(nn.PReLU(5))


class Twice(Slope):
    def forward(self, x):
        return self.down(self.activation(self.up(x))) + self.activation(x)


class Shared(nn.Module):
    """Two networks whose activations are one."""

    def __init__(self):
        super().__init__()
        activation = nn.PReLU()
        self.layers = nn.ModuleList(Slope(activation) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Read(nn.Module):
    """Reads the slope of a network's activation past it."""

    def __init__(self):
        super().__init__()
        self.layer = Slope()

    def forward(self, x):
        return self.layer(x) * self.layer.activation.weight


def loss(model, step):
    return square(model(numbers(2, 5, WIDTH, seed=step)))


@on_ranks(2, 3)
@pytest.mark.parametrize(("kind", "rows"), [(Slope, 1), (Slopes, 0), (Twice, 0), (Shared, 0), (Read, 1)])
def test_networks_are_split_where_one_slope_is_that_of_all_numbers(kind, rows):
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(WIDTH), kind()).double()
    check_exact(model, loss)
    assert len(split(model)[1]) == rows


@on_ranks(2)
def test_activations_of_transformers_that_are_trained_are_known():
    activations = pytest.importorskip("transformers.activations")
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(WIDTH), Slope(activations.XIELUActivation(dtype=torch.float64))).double()
    check_exact(model, loss)
    assert len(split(model)[1]) == 1
