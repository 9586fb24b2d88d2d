"""Modules that a forward copies or makes stay with who does."""

import copy

import pytest
import torch
from beside_one_process import DTYPE, both, data, loss_of, placed_chain
from pipeline_networks import WIDTH
from torch import nn

import tulle
from ranks import on_ranks
from tulle import comm, pipeline
from tulle.errors import ModelError


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


class Adapter(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer, self.down = layer, nn.Parameter(torch.ones(1, WIDTH, dtype=DTYPE))

    def forward(self, x):
        return self.layer(x) + x @ self.down.T


def another_layer(layer):
    return nn.Linear(WIDTH, WIDTH, dtype=DTYPE)


@on_ranks(2)
@pytest.mark.parametrize("changed", [another_layer, Adapter])
@pytest.mark.parametrize("place", [0, 3])
def test_a_layer_that_is_put_into_a_placed_model_is_refused_on_all_ranks_alike(changed, place):
    """One rank alone would train it: of the first layer's input all ranks have the numbers, and compute with it."""
    mesh = tulle.init(pipe=-1, timeout=8)
    model = placed_chain(mesh)
    step = pipeline.step(micro_batches=2)(loss_of)
    step(model, data())
    model.layers[place] = changed(model.layers[place])
    with pytest.raises(ModelError, match=r"of shape .* that is trained and in no model .*another layer") as raised:
        step(model, data())
    assert len(set(comm.gather_values(str(raised.value), mesh["pipe"], label="said"))) == 1


@on_ranks(2)
def test_what_a_frozen_layer_of_ones_own_gives_enters_a_placed_model():
    mesh = tulle.init(pipe=-1, timeout=8)
    model, own = placed_chain(mesh), nn.Linear(WIDTH, WIDTH, dtype=DTYPE).requires_grad_(False)
    given = [own(data()), nn.Parameter(data()) * 2]
    with torch.no_grad():
        assert model(given[1]).shape == data().shape
    pipeline.step(micro_batches=2)(loss_of)(model, given[0])
