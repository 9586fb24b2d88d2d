"""Parameters that a model reads past its attributes, from a list of its own or a closure, are the wholes in forward."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import tulle
from ranks import on_ranks
from tulle.plan import Memory, Plan


class Block(nn.Module):
    """Reads its weights from a list, of which torch does not know, and writes in one of them."""

    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(6, 6) / 3) for _ in range(2)])
        self.kept, self.shapes = list(self.weights), []

    def forward(self, x):
        with torch.no_grad():
            self.kept[0].clamp_(-0.5, 0.5)
        self.shapes += [tuple(weight.shape) for weight in self.kept]
        for weight in self.kept:
            x = x + torch.tanh(x @ weight)
        return x


class Listed(nn.Module):
    """Has an output layer that is tied by a list, and a scale by a closure, whose part is one number on two ranks."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(12, 6)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.scale = scale = nn.Parameter(torch.randn(2))
        self.kept, self.scaled = [self.embed.weight], lambda x: x * scale

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        x = self.scaled(x.unflatten(-1, (3, 2))).flatten(-2)
        logits = functional.linear(x, torch.cat([self.kept[0][:4], 2 * self.kept[0][4:]]))
        penalty = sum(weight.pow(2).sum() for weight in self.kept)
        return functional.cross_entropy(logits.flatten(0, 1), ids.flatten()) + 0.01 * penalty


def trained(mesh=None, recompute=()):
    torch.manual_seed(1)
    model = Listed().double()
    optimizer = torch.optim.Adam(model.parameters(), 0.01, eps=1e-3)
    if mesh is not None:
        plan = Plan(mesh.shape, memory=Memory(full_shard=True, recompute=recompute))
        model, optimizer = tulle.distribute(model, optimizer, mesh, plan=plan)
    for step in range(4):
        ids = torch.randint(12, (4, 5), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(ids if mesh is None else ids.chunk(mesh.size)[mesh["data"].rank]).backward()
        optimizer.step()
    assert {*model.blocks[0].shapes} == {(6, 6)}, "those of the wholes"
    return model


@pytest.mark.parametrize("recompute", [(), ("blocks.0", "blocks.1", "blocks.2")], ids=["", "recomputed"])
@on_ranks(2)
def test_they_train_as_in_one_process(recompute):
    expected = trained().state_dict()
    model = trained(tulle.init(data=-1), recompute)
    for name, value in model.state_dict().items():
        assert torch.allclose(value, expected[name], rtol=1e-12, atol=1e-14), name


@on_ranks(2)
def test_their_own_matters_stay_the_parts():
    class Asking(nn.Linear):
        def forward(self, x):
            kept = self.kept[0]
            assert kept.shape == (4, 4)
            assert kept.detach().to_local().shape == kept.data.to_local().shape == (2, 4)
            kept.data.mul_(0.5)  # as a moving average does, within forward
            assert torch.zeros_like(kept).shape == (4, 4)
            return super().forward(x)

    mesh, model = tulle.init(data=-1), Asking(4, 4)
    model.kept = [model.weight]
    before = model.weight.detach().clone()
    plan = Plan(mesh.shape, memory=Memory(full_shard=True))
    tulle.distribute(model, torch.optim.SGD(model.parameters()), mesh, plan=plan)
    model(torch.ones(1, 4))
    assert model.weight.to_local().shape == (2, 4)
    assert torch.equal(model.state_dict()["weight"], 0.5 * before)
