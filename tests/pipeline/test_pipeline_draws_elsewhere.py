"""Random numbers for what lives at another stage are drawn on all ranks, which go on alike, as one process would."""

import pytest
import torch
from torch import nn

import tulle
from rank_process import patches
from ranks import on_ranks
from tulle import pipeline
from tulle.pipeline import elsewhere

WIDTH = 5


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("noise", torch.zeros(WIDTH))

    def forward(self, x):
        return self.linear(x) + self.noise


def by_init(module):
    nn.init.orthogonal_(module.linear.weight)
    nn.init.trunc_normal_(module.linear.weight)
    module.linear.reset_parameters()


def by_methods(module):
    module.noise.normal_()
    module.linear.weight.data.uniform_(-1, 1)
    module.linear.weight.data[1:3].normal_(0, 0.1)
    module.noise.data.bernoulli_(0.5)


def by_functions(module):
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter))
            parameter.mul_(torch.bernoulli(parameter.sigmoid()))
        module.linear.weight.copy_(nn.functional.dropout(module.linear.weight))


def by_a_generator_of_ones_own(module, own):
    module.noise.normal_(generator=own)


@on_ranks(2)
@pytest.mark.parametrize("draw", [by_init, by_methods, by_functions], ids=lambda draw: draw.__name__)
@pytest.mark.parametrize("at_once", [elsewhere._DRAWN_BYTES, 64], ids=["at once", "in chunks"])
def test_what_is_drawn_afterwards_is_what_one_process_draws(draw, at_once):
    patches.setattr(elsewhere, "_DRAWN_BYTES", at_once)
    mesh, models = tulle.init(pipe=-1, timeout=8), []
    for is_placed in (False, True):
        torch.manual_seed(0)
        own = torch.Generator().manual_seed(1)
        model = nn.Sequential(Noisy(), Noisy())
        if is_placed:
            pipeline.place(model, mesh["pipe"], {"0": 0, "1": 1})
        for module in model:
            draw(module)
            by_a_generator_of_ones_own(module, own)
        models.append((model, torch.randn(3), torch.randn(3, generator=own)))
    (expected, *drawn), (placed, *after) = models
    assert all(map(torch.equal, drawn, after))
    here = placed[mesh.rank].state_dict()
    assert all(torch.equal(here[name], value) for name, value in expected[mesh.rank].state_dict().items())
    away = placed[1 - mesh.rank].noise
    assert away.is_meta
    assert away.device.type == "cpu"
