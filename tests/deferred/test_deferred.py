"""A model that is built without memory gets the values, to the last bit, that it would have had."""

import pytest
import torch
from deferred_networks import Everything, Layers, Positions, assert_same, built, names_of
from torch import nn
from torch.nn import init

from tulle.deferred import deferred_init, is_deferred, materialize, needs, replay, values_of
from tulle.deferred.record import View
from tulle.errors import ModelError


def test_a_model_gets_the_values_of_one_that_was_built_with_memory():
    torch.manual_seed(5)
    expected = Everything()
    drawn_next = torch.rand(3)
    model = built(Everything)
    assert is_deferred(model)
    assert model.rates == expected.rates
    assert all(parameter.is_meta for name, parameter in model.named_parameters() if name not in ("array", "counts"))
    materialize(model)
    assert not is_deferred(model)
    assert_same(model, expected)
    assert model.out.weight is model.words.weight
    assert torch.equal(torch.rand(3), drawn_next), "the random state goes on as if it had been built now"
    assert [p.requires_grad for p in model.parameters()] == [p.requires_grad for p in expected.parameters()]
    assert [type(p) for p in model.parameters()] == [type(p) for p in expected.parameters()]


@pytest.mark.parametrize(
    "known",
    [
        lambda weight: torch.linspace(3.0, 6.0, 4).to(device=weight.device, dtype=weight.dtype),
        lambda weight: torch.cat([torch.ones(1, device=weight.device), torch.arange(3.0).to(weight)]),
        lambda weight: torch.zeros_like(torch.arange(4.0), device=weight.device),
        lambda weight: torch.where(torch.tensor([True, False] * 2).to(weight.device), weight.detach(), 2.0),
        lambda weight: torch.tensor([1.0, 2.0, 3.0, 4.0], device=weight.device),
        lambda weight: weight.new_tensor([1.0, 2.0, 3.0, 4.0]),
    ],
    ids=["to", "cat", "like", "where", "tensor", "new_tensor"],
)
def test_known_numbers_are_not_lost_by_the_way_to_where_parameters_are(known):
    """As in xLSTM of transformers, whose gates had then whatever lay in memory."""

    def make():
        layer = nn.Linear(4, 4)
        layer.register_buffer("known", known(layer.bias))
        layer.bias.data.copy_(known(layer.bias))
        return layer

    torch.manual_seed(5)
    expected, model = make(), built(make)
    materialize(model)
    assert_same(model, expected)


def test_random_numbers_that_were_drawn_in_between_stay_as_they_are():
    torch.manual_seed(5)
    expected = nn.Linear(3, 3)
    model = built(nn.Linear, in_features=3, out_features=3)
    torch.manual_seed(8)
    materialize(model)
    assert_same(model, expected)
    drawn = torch.rand(3)
    assert torch.equal(drawn, torch.rand(3, generator=torch.Generator().manual_seed(8)))


def test_parameters_stay_the_objects_that_an_optimizer_has():
    model = built(nn.Linear, in_features=3, out_features=3)
    optimizer = torch.optim.Adam(model.parameters())
    before = list(model.parameters())
    materialize(model)
    assert all(one is other for one, other in zip(model.parameters(), before, strict=True))
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    assert optimizer.state[model.weight]["exp_avg"].abs().sum() > 0


def test_two_models_of_one_context_are_drawn_one_after_the_other():
    torch.manual_seed(5)
    expected = [nn.Linear(3, 3), nn.Linear(3, 2)]
    torch.manual_seed(5)
    with deferred_init():
        models = [nn.Linear(3, 3), nn.Linear(3, 2)]
    for model, other in zip(models, expected, strict=True):
        torch.manual_seed(5)
        materialize(model)
        assert_same(model, other)


def test_whatever_is_made_the_values_and_what_is_drawn_next_are_those_of_one_process():
    torch.manual_seed(5)
    expected = Everything()
    drawn_next = torch.rand(3)
    theirs = expected.state_dict()
    for name in names_of(expected):
        model = built(Everything)
        materialize(model, only=[name])
        assert torch.equal(model.state_dict()[name], theirs[name]), name
        assert torch.equal(torch.rand(3), drawn_next), name
        other = "words.weight" if name != "words.weight" else "free"
        assert is_deferred(model.get_parameter(other))


def test_the_rest_may_be_made_later():
    torch.manual_seed(5)
    expected = Everything()
    model = built(Everything)
    names = names_of(model)
    materialize(model, only=names[1::2])
    drawn = torch.get_rng_state()
    materialize(model, only=names[::2])
    assert not is_deferred(model)
    assert_same(model, expected)
    assert torch.equal(torch.get_rng_state(), drawn)


def test_a_stream_that_leaves_out_the_numbers_of_others_would_differ(monkeypatch):
    torch.manual_seed(5)
    expected = Everything()
    monkeypatch.setattr(replay, "draw_in_vain", lambda *_: None)
    model = built(Everything)
    materialize(model, only=["free"])
    assert not torch.equal(model.free, expected.free)


class Dependent(nn.Module):
    """How many numbers are drawn depends on numbers that were drawn before."""

    def __init__(self) -> None:
        super().__init__()
        self.rates = nn.Parameter(torch.rand(50) * 30)
        self.counts = nn.Parameter(torch.poisson(self.rates.detach()))
        self.after = nn.Linear(3, 3)


def test_draws_that_depend_on_values_are_made_with_them():
    torch.manual_seed(5)
    expected = Dependent()
    model = built(Dependent)
    materialize(model, only=["after.weight"])
    assert torch.equal(model.after.weight, expected.after.weight)
    assert model.rates.is_meta
    assert model.counts.is_meta


def test_draws_without_the_values_that_they_depend_on_would_differ(monkeypatch):
    torch.manual_seed(5)
    expected = Dependent()
    monkeypatch.setattr(needs, "_is_drawn_in_vain", lambda _: True)
    monkeypatch.setattr(needs, "_without_values", lambda one: torch.ones(one.shape) if isinstance(one, View) else one)
    model = built(Dependent)
    materialize(model, only=["after.weight"])
    assert not torch.equal(model.after.weight, expected.after.weight)


def test_a_tied_parameter_is_made_by_any_of_its_names():
    model = built(Everything)
    materialize(model, only=["out.weight"])
    assert not model.words.weight.is_meta
    with pytest.raises(ModelError, match=r"no parameter or buffer 'out\.wieght': name those of named_parameters\(\)"):
        materialize(built(Everything), only=["out.wieght"])


def test_values_are_told_and_the_model_stays_as_it_is():
    torch.manual_seed(5)
    expected = Everything()
    model = built(Everything)
    before = torch.get_rng_state()
    names = names_of(model)
    values = values_of(model, names)
    assert all(torch.equal(values[name], expected.state_dict()[name]) for name in names)
    assert is_deferred(model)
    assert torch.equal(torch.get_rng_state(), before)
    materialize(model)
    assert_same(model, expected)


def test_values_that_are_not_drawn_are_told_without_drawing(monkeypatch):
    model = built(Everything)
    monkeypatch.setattr(replay, "draw_in_vain", lambda *_: pytest.fail("nothing is to be drawn"))
    values = values_of(model, ["big_positions.table"])
    torch.testing.assert_close(values["big_positions.table"], Positions(3000, 100).table, rtol=0, atol=0)


class Own(nn.Module):
    """Draws from a generator of its own."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.empty(40).normal_(generator=generator))
        self.other = nn.Parameter(torch.randn(5, generator=generator))


def test_generators_of_the_model_go_on_as_in_one_process():
    expected = Own(torch.Generator().manual_seed(7))
    generator = torch.Generator().manual_seed(7)
    model = built(Own, generator=generator)
    assert torch.equal(values_of(model, ["other"])["other"], expected.other)
    materialize(model, only=["other"])
    assert torch.equal(model.other, expected.other)


class Late(nn.Module):
    """Known, small numbers that are then drawn over."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4))
        init.normal_(self.weight)


def test_a_model_whose_memory_is_there_without_its_values_is_deferred():
    torch.manual_seed(5)
    expected = Late()
    model = built(Late)
    assert is_deferred(model)
    materialize(model)
    assert not is_deferred(model)
    assert_same(model, expected)


def test_modules_on_meta_are_reset_in_turn():
    torch.manual_seed(5)
    expected = Layers()
    with torch.device("meta"):
        model = Layers()
    torch.manual_seed(5)
    materialize(model)
    assert_same(model, expected)
