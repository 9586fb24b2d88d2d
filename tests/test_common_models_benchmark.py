"""The page of `benchmarks/common-models` shows what its raw result says, and its models train."""

import json
from types import ModuleType

import pytest
import torch

from benchmark_modules import BENCHMARKS, load

FOLDER = BENCHMARKS / "common-models"


@pytest.fixture
def command(monkeypatch) -> ModuleType:
    """The benchmark as a module."""
    monkeypatch.syspath_prepend(str(FOLDER))
    return load("common-models")


def test_its_table_is_of_the_raw_result(command):
    raw = json.loads((FOLDER / "results" / "4x500mbit.json").read_text(encoding="utf-8"))
    shown = command.table(raw["found"], raw["models"], raw["ways"])
    assert len(shown.splitlines()) == 2 + len(command.MODELS)
    assert shown in (FOLDER / "README.md").read_text(encoding="utf-8")


def test_ways_that_failed_are_said_to_have(command):
    found = [{"model": "bags", "way": "ddp", "ms": 20.0}, {"model": "bags", "way": "tulle", "error": "no"}]
    assert command.table(found, ["bags"], ["ddp", "tulle"]).splitlines()[-1] == "| bags | 20 | failed |  |"


@pytest.mark.parametrize("name", ["bags", "pictures", "next item"])
def test_a_step_of_a_model_makes_its_loss_smaller(command, name):
    torch.manual_seed(0)
    model = command.MODELS[name]()
    optimizer, batch = model.optimizer(), model.batch(torch.Generator().manual_seed(0))
    losses = []
    for _ in range(3):
        losses.append(model(*batch))
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0]
