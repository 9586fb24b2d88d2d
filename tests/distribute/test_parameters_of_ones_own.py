"""A model whose `parameters()` gives those only that are trained, as preference models do, is whole nevertheless."""

import pytest
import torch
from test_what_a_user_writes import plain_loop
from torch import nn

import tulle
from ranks import on_ranks
from tulle.plan import Plan


class Preference(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.policy = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
        self.reference = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)).requires_grad_(False)

    def parameters(self):
        return self.policy.parameters()

    def forward(self, x):
        return (self.policy(x) - self.reference(x)).pow(2).mean()


def made(seed):
    torch.manual_seed(seed)
    model = Preference().double()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize("kind", ["replicas", "dealt", "by hand", "model"])
@on_ranks(2)
def test_every_rank_begins_with_all_parameters_of_rank_0(kind):
    x = torch.arange(8.0, dtype=torch.float64).view(2, 4)
    expected = plain_loop(*made(0), [x] * 3)
    axis = {"replicas": "data", "model": "model"}.get(kind, "pipe")
    mesh = tulle.init(**{axis: 2}, timeout=8)
    options = {
        "replicas": {},
        "dealt": {"plan": "auto", "sample": x},
        "by hand": {"plan": Plan({"pipe": 2}, stages={"policy": 0, "reference": 1})},
        "model": {"plan": Plan({"model": 2})},
    }[kind]
    model, optimizer = tulle.distribute(*made(mesh.rank), mesh, **options)
    assert plain_loop(model, optimizer, [x] * 3) == pytest.approx(expected, rel=1e-12)
