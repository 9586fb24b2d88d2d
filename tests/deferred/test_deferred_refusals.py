"""What cannot be built without memory, or given values later, is refused by name."""

from functools import partial

import pytest
import torch
from deferred_networks import Bare, Taker, built
from torch import nn
from torch.nn import init

from tulle.deferred import deferred_init, materialize
from tulle.errors import ModelError


def test_a_module_that_nothing_fills_is_named():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(1, 1), Bare())
    text = r"'1.scale' is on device meta, and Bare has no reset_parameters that fills it: build the model within"
    with pytest.raises(ModelError, match=text):
        materialize(model)
    assert model[0].weight.is_meta


def test_only_what_is_to_be_made_of_a_model_on_meta_must_have_a_reset():
    torch.manual_seed(5)
    expected = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), Bare())
    torch.manual_seed(5)
    materialize(model, only=["1.weight"])
    assert torch.equal(model[1].weight, expected[1].weight)
    assert model[2].scale.is_meta


def test_a_model_with_values_stays_as_it_is():
    model = nn.Linear(2, 2)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    materialize(model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_name_that_is_not_there_is_refused():
    with pytest.raises(ModelError, match=r"the model has no 'wieght' without values: name parameters on device meta"):
        materialize(built(nn.Linear, in_features=3, out_features=3), keep={"wieght": Taker()})


class Reading(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))
        assert self.weight.sum().item() != 0


def comparing(compare):
    return compare(torch.randn(3), torch.zeros(3))


@pytest.mark.parametrize(
    "make",
    [Reading, partial(comparing, torch.allclose), partial(comparing, torch.equal)],
    ids=["item", "allclose", "equal"],
)
def test_a_model_that_reads_values_while_it_is_built_is_told(make):
    with pytest.raises(ModelError, match="the model reads a number of a tensor while it is built"):
        built(make)


@pytest.mark.parametrize("make", [torch.Tensor.nonzero, torch.Tensor.to_sparse], ids=["size", "sparse"])
def test_a_tensor_that_is_made_by_values_while_a_model_is_built_is_told(make):
    with pytest.raises(ModelError, match="makes a tensor whose size depends on values, or a sparse one, while"):
        built(lambda: make(torch.randn(3, 3)))


def test_models_of_two_contexts_are_refused():
    model = nn.Sequential(
        built(nn.Linear, in_features=3, out_features=3), built(nn.Linear, in_features=3, out_features=3)
    )
    with pytest.raises(ModelError, match=r"come from 2 tulle.deferred_init: build all of it within one"):
        materialize(model)


def test_a_seed_within_is_that_of_the_numbers_drawn_after_it():
    with deferred_init():
        torch.manual_seed(5)
        model = nn.Linear(4, 3)
    torch.manual_seed(6)
    materialize(model)
    torch.manual_seed(5)
    assert torch.equal(model.weight, nn.Linear(4, 3).weight)


def test_a_seed_between_two_draws_is_refused():
    with deferred_init():
        nn.Linear(4, 3)
        torch.manual_seed(5)
        with pytest.raises(ModelError, match="seed before the model draws its first"):
            nn.Linear(4, 3)


@pytest.mark.parametrize("change", [nn.Module.double, lambda model: init.zeros_(model.weight)], ids=["dtype", "values"])
def test_what_is_changed_after_the_context_is_refused(change):
    model = built(nn.Linear, in_features=3, out_features=3)
    change(model)
    with pytest.raises(ModelError, match=r"'weight' was converted, or written to, after tulle.deferred_init"):
        materialize(model)
