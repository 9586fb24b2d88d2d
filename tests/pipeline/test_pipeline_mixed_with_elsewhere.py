"""What has values here is not computed with what lives at another stage, where a CPU would take what lies in memory."""

import numpy
import pytest
import torch
from torch import nn

import tulle
from ranks import on_ranks
from tulle import pipeline
from tulle.errors import CommunicationError, ModelError

WIDTH = 6


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return self.linear(x).tanh()


def placed():
    mesh = tulle.init(pipe=-1, timeout=8)
    torch.manual_seed(0)
    model = nn.Sequential(Layer(), Layer())
    return mesh, pipeline.place(model, mesh["pipe"], {"0": 0, "1": 1})


@on_ranks(2)
def test_products_sums_and_averages_with_it_are_refused_by_name():
    mesh, model = placed()
    away, own = model[1 - mesh.rank].linear.weight.detach(), torch.ones(WIDTH, WIDTH)
    text = "was given a parameter or buffer of shape .6, 6. that lives at another stage"
    for mixed in (
        lambda: own @ away,
        lambda: own + away,
        lambda: own.mul_(0.5).add_(away, alpha=0.5),
        lambda: own.lerp_(away, 0.5),
        lambda: torch.stack([own, away]),
    ):
        with pytest.raises(ModelError, match=text):
            mixed()


@on_ranks(2)
def test_to_ask_for_its_values_is_refused_by_name():
    mesh, model = placed()
    away = model[1 - mesh.rank].linear.weight.detach()
    for read in (
        lambda: away.sum().item(),
        lambda: bool((away > 0).any()),
        lambda: f"{away.norm():.3f}",
        lambda: away.cpu().numpy(),
        lambda: numpy.asarray(away),
        lambda: away[away > 0],
        lambda: torch.equal(away, away),
    ):
        with pytest.raises(
            ModelError, match=r"^\w+ reads a parameter .* of shape .* at another stage, outside of tulle\.step"
        ):
            read()


@on_ranks(2)
def test_what_asks_for_its_shape_alone_or_a_number_or_writes_in_it_goes_on():
    mesh, model = placed()
    away, own = model[1 - mesh.rank].linear.weight.detach(), torch.ones(WIDTH * WIDTH)
    assert own.view_as(away).shape == away.shape
    assert torch.zeros_like(away).is_meta
    assert (away * torch.tensor(2.0)).is_meta
    assert away.copy_(own.view_as(away)) is away
    assert away.mul_(0.5).add_(own.view_as(away)) is away


@on_ranks(2)
def test_a_module_of_another_stage_within_a_placed_one_is_an_error_on_all_ranks():
    mesh, model = placed()
    x = torch.ones(2, WIDTH)
    with torch.no_grad():
        assert model(x).sum().item() == model(x).sum().item()
        model[1].linear = model[0].linear
        with pytest.raises(ModelError if mesh.rank else CommunicationError, match="linear was given a parameter"):
            model(x).sum().item()
