"""A module of a distributed model is saved as the model is, wherever its parameters live: a generator, an encoder."""

import pytest
import torch
from axes_models import build, distributed, worst_difference
from torch import nn

import tulle
from ranks import on_ranks
from tulle import pipeline
from tulle.errors import CheckpointError

SHAPES = {"pipe": 2}, {"data": 2, "pipe": 2}, {"pipe": 2, "model": 2}


def of_one(name):
    return build("stack").get_submodule(name).state_dict()


@on_ranks(2)
@pytest.mark.parametrize("name", ["words", "encoder", "encoder.layers.1", "out"])
def test_the_whole_of_a_module_is_gathered_from_the_stages(name):
    model, _, _ = distributed("stack", {"pipe": 2})
    found = tulle.full_state_dict(model.get_submodule(name), everywhere=True)
    assert worst_difference(found, of_one(name)) == 0
    assert tulle.full_state_dict(model.get_submodule(name)).keys() == (
        found.keys() if torch.distributed.get_rank() == 0 else set()
    )


@on_ranks(4)
@pytest.mark.parametrize("shape", SHAPES[1:], ids=str)
def test_the_whole_of_a_module_is_gathered_on_several_axes(shape):
    model, _, _ = distributed("stack", shape)
    assert worst_difference(tulle.full_state_dict(model.encoder, everywhere=True), of_one("encoder")) == 0


@on_ranks(2)
def test_a_module_is_saved_and_loads_into_a_plain_one_and_back(tmp_path):
    model, _, _ = distributed("stack", {"pipe": 2})
    tulle.save(tmp_path / "checkpoint", model.encoder, epoch=3)
    plain = build("stack").encoder
    nn.init.zeros_(plain.layers[0].linear1.weight)
    assert tulle.load(tmp_path / "checkpoint", plain) == {"epoch": 3}
    assert worst_difference(plain.state_dict(), of_one("encoder")) == 0
    with torch.no_grad():
        for parameter in model.encoder.parameters():
            parameter.zero_()
    tulle.load(tmp_path / "checkpoint", model.encoder)
    assert worst_difference(tulle.full_state_dict(model, everywhere=True), build("stack").state_dict()) == 0


@on_ranks(2)
def test_a_list_of_modules_of_one_model_is_gathered():
    model, _, _ = distributed("stack", {"pipe": 2})
    found = tulle.full_state_dict(nn.ModuleList([model.out, model.words]), everywhere=True)
    plain = build("stack")
    assert worst_difference(found, nn.ModuleList([plain.out, plain.words]).state_dict()) == 0


@on_ranks(2)
def test_a_module_of_a_model_that_nobody_distributed_is_refused():
    mesh = tulle.init(pipe=2)
    model = pipeline.place(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), mesh["pipe"], {"0": 0, "1": 1})
    with pytest.raises(CheckpointError, match=r"was placed by pipeline\.place alone"):
        tulle.full_state_dict(model[1])
