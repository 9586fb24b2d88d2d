"""Modules that are called without the one that gathers for them, or that write into parameters, train as ever."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import tulle
from ranks import on_ranks
from tulle.memory import share_out, shared_out


class Recomputing(nn.Module):
    """Recomputes a part of itself, by a call of its own."""

    def __init__(self, use_reentrant):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 6))
        self.use_reentrant = use_reentrant

    def forward(self, x):
        return x + checkpoint(self.inner, x, use_reentrant=self.use_reentrant)


class Clamped(nn.Module):
    """Writes into its parameter before it reads it."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))

    def forward(self, x):
        with torch.no_grad():
            self.weight.clamp_(-0.3, 0.3)
        return torch.tanh(x @ self.weight)


class Attending(nn.Module):
    """Reads the parameters of modules in it without calling them."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.out = nn.Linear(6, 6)

    def forward(self, x):
        return self.attended(x).pow(2).mean()

    def attended(self, x):
        return self.out(self.attention(x[:, None], x[:, None], x[:, None])[0])


def whole(model, x):
    return model(x).pow(2).mean()


def in_parts(model, x):
    return model.attended(x).pow(2).mean() + model(x)


KINDS = {
    "recomputed": (lambda: nn.Sequential(nn.Linear(6, 6), Recomputing(False), Recomputing(False)), whole),
    "recomputed by reentry": (lambda: nn.Sequential(nn.Linear(6, 6), Recomputing(True), Recomputing(True)), whole),
    "written": (lambda: nn.Sequential(Clamped(), Clamped()), whole),
    "called in parts": (Attending, in_parts),
}


def trained(kind, axis=None):
    build, loss = KINDS[kind]
    torch.manual_seed(0)
    model = build().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    if axis is not None:
        units = ["", *(name for name, _ in model.named_children())]
        share_out(model, axis, units, stay=[""], optimizers=[optimizer])
    for step in range(5):
        x = torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        loss(model, x if axis is None else x.chunk(axis.size)[axis.rank]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def compare(kind):
    wanted = trained(kind)
    found = trained(kind, tulle.init(data=-1)["data"])
    assert list(found) == list(wanted)
    assert max((found[name] - wanted[name]).abs().max().item() for name in wanted) < 1e-12


@on_ranks(2)
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_one_process(kind):
    compare(kind)


@on_ranks(2)
def test_the_twin_that_forgets_what_was_written_is_found(monkeypatch):
    monkeypatch.setattr(shared_out, "_write_back", lambda *_: None)
    with pytest.raises(AssertionError):
        compare("written")
