"""What `state_dict()` gives of a part is no whole to who would keep it for one, and a plain tensor to all others."""

import copy
import io

import pytest
import torch
import torch.distributed.checkpoint as dcp
from axes_models import build
from sharded_plans import stepped_in_parts
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

import tulle
from ranks import on_ranks
from test_checkpoint import told
from tulle.parts import stated


def distributed(how):
    return stepped_in_parts(build("dense words"), how, {"words": 0, "tags": 0, "layers": 1, "out": 1}, "words.weight")


@on_ranks(2)
@pytest.mark.parametrize("how", ["rows", "full_shard", "model"])
def test_torchs_checkpoints_refuse_states_that_they_were_given(how, tmp_path):
    model, optimizer = distributed(how)
    states = {"optimizer": optimizer.state_dict(), **({"model": model.state_dict()} if how == "rows" else {})}
    for name, state in states.items():
        with pytest.raises(CheckpointException, match=r"was given rank [01] of 2.* part of .*tulle\.save and tulle\.l"):
            dcp.save({name: state}, checkpoint_id=tmp_path / name)
    if how == "rows":
        dcp.save({"model": {"words.weight": torch.zeros_like(states["model"]["words.weight"])}}, checkpoint_id=tmp_path)
        with pytest.raises(CheckpointException, match=r"was given rank [01] of 2's part of 'words.weight'"):
            dcp.load({"model": {"words.weight": states["model"]["words.weight"]}}, checkpoint_id=tmp_path)


@on_ranks(2)
def test_the_log_says_once_that_a_part_is_pickled():
    model, optimizer = distributed("rows")
    stated._warned.clear()
    with told() as said:
        torch.save(tulle.full_state_dict(model), io.BytesIO())
        copy.deepcopy(model.state_dict())
        assert said == []
        for _ in range(2):
            torch.save((model.state_dict(), optimizer.state_dict()), io.BytesIO())
    assert len(said) == 1
    assert "'s part of 'words.weight' is pickled" in said[0]
    assert "tulle.full_state_dict(model)" in said[0]
    stated._warned.clear()
    with told() as said:
        torch.save([model.words.weight.data, model.words.weight], io.BytesIO())
    assert len(said) == 1
    assert "pickle was given the table 'words.weight' as if all of it were here" in said[0]


@on_ranks(2)
def test_it_is_a_plain_tensor_elsewhere():
    model, optimizer = distributed("rows")
    state, parameter = model.state_dict(), model.get_parameter("words.weight")
    part, before = state["words.weight"], parameter.detach().clone()
    assert part.data_ptr() == parameter.data_ptr()
    assert type(part * 2) is type(copy.deepcopy(part)) is type(part.clone()) is torch.Tensor
    part.mul_(2)
    assert torch.equal(parameter.detach(), before * 2)
    assert nn.Parameter(part).requires_grad
    average = {name: value.detach().clone() for name, value in state.items()}
    for mine, other in zip(average.values(), state.values(), strict=True):
        mine.mul_(0.5).add_(other, alpha=0.5)
    assert torch.equal(average["words.weight"], part)
    optimizer.load_state_dict(optimizer.state_dict())
    assert {type(value) for one in optimizer.state.values() for value in one.values()} == {torch.Tensor}
    optimizer.step()
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    assert type(torch.load(buffer)["words.weight"]) is torch.Tensor
    assert isinstance(model.state_dict(keep_vars=True)["words.weight"], nn.Parameter)
