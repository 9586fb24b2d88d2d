"""The page of `benchmarks/one-machine` shows what its raw result says, and its models train."""

import json
from types import ModuleType

import pytest
import torch

from benchmark_modules import BENCHMARKS, load

FOLDER = BENCHMARKS / "one-machine"


@pytest.fixture
def command(monkeypatch) -> ModuleType:
    """The benchmark as a module."""
    for folder in (BENCHMARKS / "memory", FOLDER):
        monkeypatch.syspath_prepend(str(folder))
    return load("one-machine")


def test_its_tables_are_of_the_raw_result(command):
    rows = json.loads((FOLDER / "results.json").read_text(encoding="utf-8"))["rows"]
    page = (FOLDER / "README.md").read_text(encoding="utf-8")
    beside_torch = command.table(rows, ["replicas", "full sharding"])
    assert len(beside_torch.split("\n")) == 3 + len(command.MODELS)
    assert beside_torch in page
    assert command.table(rows, ["split layers", "stages"]) in page


def test_a_way_that_raised_is_named_by_its_error(command):
    row = {"section": "replicas", "model": "LSTM", "error": "ValueError: no"}
    assert command.cells(row) == " ValueError | |"


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "U-Net", "DLRM, 8 tables, sparse"])
def test_a_step_of_a_model_makes_its_loss_smaller(command, name):
    torch.manual_seed(0)
    job = command.MODELS[name]()
    optimizer, batch = job.optimizer(), job.batch(0)
    losses = []
    for _ in range(3):
        losses.append(job.loss(job.model, batch))
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0]
