"""Under `tulle profile`, what a script trains is profiled on the batches that it trains on."""

import copy
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import tulle
from profiles import profile_of
from tulle.distribute import putting
from tulle.engine import is_looking_ahead
from tulle.profiling import PROFILE, timing
from tulle.workload import Profile


@pytest.fixture
def asked(monkeypatch, tmp_path):
    monkeypatch.setattr(timing, "BUDGET_S", 0.02)
    monkeypatch.setenv(PROFILE, "profile.json")
    monkeypatch.setenv("TULLE_RUN_DIR", str(tmp_path))
    return tmp_path / "profile.json"


def train(steps: int, through: Any = iter) -> None:
    mesh = tulle.init(data=-1)
    model = nn.Sequential(nn.Embedding(40, 4, sparse=True), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = tulle.distribute(model, optimizer, mesh)
    for step in through(range(steps)):
        model(torch.tensor([step, step + 1, step])).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(("through", "is_ahead"), [(iter, False), (tulle.lookahead, True)])
def test_a_profile_says_if_the_loop_goes_through_lookahead(asked, through, is_ahead):
    with mock.patch("tulle.profiling.script.profile", return_value=profile_of()):
        train(3, through)
    assert Profile.load(asked).lookahead == is_ahead
    assert not is_looking_ahead(), "the loop is over"


def test_three_steps_make_a_profile(asked):
    train(5)
    (table,) = Profile.load(asked).tables
    assert [[rows.tolist() for rows in step] for step in table.stream] == [[[0, 1]], [[1, 2]], [[2, 3]]]
    assert table.tokens == 3


class Labelled(nn.Module):
    """Called as Hugging Face's models are: rows by position, labels by name."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(40, 4, sparse=True), nn.Linear(4, 1)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return (self.head(self.words(ids)) - labels).pow(2).mean()


def test_a_call_by_position_and_by_name_is_profiled_with_both(asked):
    model, mesh = Labelled(), tulle.init(data=-1)
    model, optimizer = tulle.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), mesh)
    for _ in range(3):
        model(torch.tensor([1, 2]), labels=torch.zeros(2, 1)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert [module.name for module in Profile.load(asked).modules] == ["words", "head"]


@pytest.mark.usefixtures("asked")
def test_the_plan_is_chosen_for_a_model_that_can_still_be_copied():
    choose = putting.choose

    def copied_and_chosen(model: nn.Module, *rest: Any) -> Any:
        copy.deepcopy(model)  # as a plan for a sample is made
        return choose(model, *rest)

    with mock.patch("tulle.distribute.putting.choose", side_effect=copied_and_chosen) as choosing:
        train(1)
    assert choosing.called


def test_fewer_make_none(asked):
    train(2)
    assert not asked.exists()


def test_nobody_is_profiled_unasked(asked, monkeypatch):
    monkeypatch.delenv(PROFILE)
    train(5)
    assert not asked.exists()
