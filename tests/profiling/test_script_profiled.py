"""Under `tulle profile`, what a script trains is profiled on the batches that it trains on."""

import pytest
import torch
from torch import nn

import tulle
from tulle.profiling import PROFILE, timing
from tulle.workload import Profile


@pytest.fixture
def asked(monkeypatch, tmp_path):
    monkeypatch.setattr(timing, "BUDGET_S", 0.02)
    monkeypatch.setenv(PROFILE, "profile.json")
    monkeypatch.setenv("TULLE_RUN_DIR", str(tmp_path))
    return tmp_path / "profile.json"


def train(steps: int) -> None:
    mesh = tulle.init(data=-1)
    model = nn.Sequential(nn.Embedding(40, 4, sparse=True), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = tulle.distribute(model, optimizer, mesh)
    for step in range(steps):
        model(torch.tensor([step, step + 1, step])).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_three_steps_make_a_profile(asked):
    train(5)
    (table,) = Profile.load(asked).tables
    assert [[rows.tolist() for rows in step] for step in table.stream] == [[[0, 1]], [[1, 2]], [[2, 3]]]
    assert table.tokens == 3


def test_fewer_make_none(asked):
    train(2)
    assert not asked.exists()


def test_nobody_is_profiled_unasked(asked, monkeypatch):
    monkeypatch.delenv(PROFILE)
    train(5)
    assert not asked.exists()
