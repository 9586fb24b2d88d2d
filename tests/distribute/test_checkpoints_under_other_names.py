"""Where a model's `state_dict` calls its parameters otherwise than they are, what is saved of parts is the whole."""

from contextlib import nullcontext

import pytest
import torch
from axes_models import build
from sharded_plans import step_by_ones, stepped_in_parts
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import tulle
from ranks import on_ranks
from tulle.errors import CheckpointError

HOWS = ("rows", "full_shard", "model", "pipe")


class Task(nn.Module):
    """A model within another, as those of open_clip."""

    def __init__(self, kind: str = "") -> None:
        super().__init__()
        self.kind, self.net = kind, build("dense words")

    def forward(self, ids):
        return self.net(ids)

    def state_dict(self, *args, **keywords):
        state = self.net.state_dict(*args, **keywords)
        if self.kind == "nested":
            return {"state_dict": state}
        return {name: value.clone() for name, value in state.items()} if self.kind == "copies" else state

    def load_state_dict(self, state_dict, strict=True, assign=False):
        return self.net.load_state_dict(state_dict, strict, assign)


def recomputed() -> nn.Module:
    """By torch's wrappers, which leave their names out of states."""
    model = build("dense words")
    model.words, model.layers = checkpoint_wrapper(model.words), checkpoint_wrapper(model.layers)
    return nn.Sequential(model)


def distributed(model, how):
    names = {name.rpartition(".")[2]: name for name, _ in model.named_modules() if "_wrapped" not in name}
    stages = {names["words"]: 0, names["tags"]: 0, names["layers"]: 1, names["out"]: 1}
    table = next(name for name, module in model.named_modules() if isinstance(module, nn.Embedding))
    return stepped_in_parts(model, how, stages, table)


@on_ranks(2)
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("made", [Task, recomputed])
def test_what_is_split_is_saved_whole_and_comes_back(made, how, tmp_path):
    plain = made()
    step_by_ones(plain, torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9))
    expected = plain.state_dict()
    model, optimizer = distributed(made(), how)
    full = tulle.full_state_dict(model, everywhere=True)
    assert list(full) == list(expected)
    torch.testing.assert_close(full, dict(expected), rtol=1e-12, atol=1e-12, check_device=False)
    tulle.save(tmp_path / "checkpoint", model, optimizer)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    tulle.load(tmp_path / "checkpoint", model, optimizer)
    torch.testing.assert_close(tulle.full_state_dict(model, everywhere=True), full, rtol=0, atol=0, check_device=False)
    other = made()
    again = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
    tulle.load(tmp_path / "checkpoint", other, again)
    torch.testing.assert_close(dict(other.state_dict()), full, rtol=0, atol=0, check_device=False)
    assert all("momentum_buffer" in again.state[parameter] for parameter in other.parameters())


@on_ranks(2)
@pytest.mark.parametrize("kind", ["nested", "copies"])
@pytest.mark.parametrize("how", [*HOWS, "replicas"])
def test_parts_that_cannot_be_told_from_wholes_are_refused(kind, how, tmp_path):
    model, optimizer = distributed(Task(kind), how)
    text = {"nested": r"Task has parameters within 'state_dict'.*tulle.distribute", "copies": "Task has no 'net.*copy"}
    refused = nullcontext() if how == "replicas" else pytest.raises(CheckpointError, match=text[kind])
    with refused:
        tulle.save(tmp_path / "checkpoint", model, optimizer)
