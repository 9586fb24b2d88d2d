"""What was put between layers after they were split together may do something else, and is refused by name."""

import copy

import pytest
from split_layers import model_axis
from split_training import numbers, split
from torch import nn

from ranks import on_ranks
from tulle import tensor_parallel
from tulle.errors import ModelError

WIDTH, INNER = 8, 10


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)


class ByName(Two):
    def __init__(self):
        super().__init__()
        self.activation, self.activations = "tanh", nn.ModuleDict({"tanh": nn.Tanh(), "soft": nn.Softmax(-1)})

    def forward(self, x):
        return self.down(self.activations[self.activation](self.up(x)))


class WithActivation(Two):
    def __init__(self):
        super().__init__()
        self.activation = nn.Tanh()

    def forward(self, x):
        return self.down(self.activation(self.up(x)))


def in_a_row():
    return nn.Sequential(nn.Linear(WIDTH, INNER), nn.Tanh(), nn.Linear(INNER, WIDTH))


@on_ranks(2)
@pytest.mark.parametrize(
    ("kind", "name", "value", "said"),
    [
        (ByName, "activation", "soft", "activation of a ByName was 'tanh'"),
        (WithActivation, "activation", nn.Softmax(-1), r"activation of a WithActivation was Tanh\(\)"),
        (in_a_row, "1", nn.Softmax(-1), r"1 of a Sequential was Tanh\(\)"),
    ],
)
def test_another_module_in_the_place_of_one_between_layers_is_refused(kind, name, value, said):
    model = kind().double()
    tensor_parallel.apply(model, model_axis(), smallest_bytes=0)
    assert len(split(model)[1]) == 1
    for one in (copy.deepcopy(model), model):
        one(numbers(2, WIDTH, seed=0))
        setattr(one, name, value)
        with pytest.raises(ModelError, match=said):
            one(numbers(2, WIDTH, seed=0))
