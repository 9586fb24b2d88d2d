"""Layers that stay whole unless asked for: what is tied to them, or reads their weights, would see a part."""

import copy
import functools

import pytest
import torch
from split_layers import layers, layers_loss, model_axis
from split_training import check_exact, ids, numbers, square
from torch import nn
from torch.func import functional_call
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

import tulle
from ranks import on_ranks
from tulle import tensor_parallel
from tulle.errors import ModelError


class Scaled(nn.Embedding):
    """A table of a class that looks up for itself."""

    def forward(self, input):
        return nn.functional.embedding(input, self.weight) * 2.0


def test_a_layer_that_is_tied_to_a_module_of_an_unknown_class_stays_whole_unless_asked_for():
    model = nn.Sequential(Scaled(8, 4), nn.Linear(4, 4, bias=False), nn.Linear(4, 8, bias=False))
    assert tensor_parallel.known(model, smallest_bytes=0, ranks=2) == ["1", "2"]
    model[2].weight = model[0].weight
    assert tensor_parallel.known(model, smallest_bytes=0, ranks=2) == ["1"]


class Head(nn.Module):
    """An output layer, to whose scores it adds its bias once more."""

    def forward(self, hidden):
        return self.decoder(hidden) + self.bias


def test_a_head_that_reads_the_bias_of_its_layer_leaves_it_and_the_table_tied_to_it_whole():
    head = Head()
    head.decoder = nn.Linear(4, 8)
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4), head)
    assert tensor_parallel.known(model, smallest_bytes=0, ranks=2) == ["0", "1", "2.decoder"]
    head.decoder.weight = model[0].weight
    assert tensor_parallel.known(model, smallest_bytes=0, ranks=2) == ["0", "1", "2.decoder"]
    head.bias = head.decoder.bias
    assert tensor_parallel.known(model, smallest_bytes=0, ranks=2) == ["1"]


def test_a_table_whose_rows_cannot_be_split_over_a_model_axis_stays_whole_unless_asked_for():
    model = nn.Sequential(nn.Embedding(8, 4), nn.Embedding(8, 4, sparse=True), nn.Embedding(8, 4, max_norm=1.0))
    assert tensor_parallel.known(model, smallest_bytes=0, ranks=2) == ["0"]


@on_ranks(2)
def test_attention_with_a_key_of_its_own_stays_whole_unless_asked_for():
    attention = {name: nn.MultiheadAttention(8, 2, **{name: True}) for name in ("add_bias_kv", "add_zero_attn")}
    model = nn.ModuleDict({**attention, "plain": nn.MultiheadAttention(8, 2)})
    assert tensor_parallel.known(model, smallest_bytes=0, ranks=2) == ["plain"]
    axis = tulle.init(model=2)["model"]
    with pytest.raises(ModelError, match="add_bias_kv has add_bias_kv or add_zero_attn, which cannot be split"):
        tensor_parallel.apply(copy.deepcopy(model), axis, select="add_bias_kv")
    tensor_parallel.apply(model, axis)
    assert [module.num_heads for module in model.values()] == [2, 2, 1]
    assert model["add_bias_kv"].in_proj_weight.shape == (24, 8)


class Reads(nn.Module):
    """Reads the weights of some of its layers itself, and asks another's for no more than its dtype."""

    def __init__(self):
        super().__init__()
        self.words, self.codes, self.body, self.mean = (nn.Linear(4, 8) for _ in range(4))
        self.inner = nn.ModuleDict({"scores": nn.Linear(4, 8)})
        self.reset()

    def reset(self):
        self.body.weight.data.zero_()

    def forward(self, x):
        distances = [torch.cdist(one, self.codes.weight) for one in self.body(x).to(self.body.weight.dtype)]
        return distances, x @ self.words.weight.T, lambda: self.mean.bias.mean(), self.inner.scores(x)


def test_layers_whose_weights_other_code_reads_stay_whole_unless_asked_for():
    model = nn.Sequential(Reads(), nn.Linear(8, 4))
    assert tensor_parallel.known(model, smallest_bytes=0, ranks=2) == ["0.body", "0.inner.scores", "1"]


class ReadsByOtherWays(nn.Module):
    """Reads the weights of some of its layers, whatever the way; of one of the list it reads none."""

    def __init__(self):
        super().__init__()
        self.alias, self.asked, self.named, self.of, self.untouched = (nn.Linear(4, 8) for _ in range(5))
        self.some, self.every, self.comprehended = (nn.ModuleList([nn.Linear(4, 8)] * 1) for _ in range(3))
        self.two = nn.ModuleList([nn.Linear(4, 8), nn.Linear(4, 8)])

    def forward(self, x, number=0):
        layer = self.alias
        weights = [layer.weight, getattr(self.asked, "weight"), getattr(self, "of").weight]  # noqa: B009
        weights += [self.get_parameter("named.weight"), self.some[number].weight, self.two[1].weight]
        for one in self.every:
            weights.append(one.weight)
        weights += [one.weight for one in self.comprehended]
        layer = self.untouched(x)
        return [x @ weight.T for weight in weights], self.two[0](x), layer


def test_weights_that_are_read_by_way_of_variables_names_and_lists_are_seen():
    model = ReadsByOtherWays()
    assert tensor_parallel.known(model, smallest_bytes=0, ranks=2) == ["untouched", "two.0"]


class ReadsInGetter(nn.Module):
    """Reads weights in methods named as those that tell of a model: forward calls one of them, as DeBERTa's does."""

    def __init__(self):
        super().__init__()
        self.places, self.told = nn.Embedding(8, 4), nn.Embedding(8, 4)

    def get_places(self):
        return self.places.weight * 0.5

    def get_told(self):
        return self.told.weight

    def forward(self, x):
        return self.told(x) @ self.get_places().T


def test_a_method_that_forward_calls_counts_whatever_its_name():
    assert tensor_parallel.known(ReadsInGetter(), smallest_bytes=0, ranks=2) == ["told"]


class Scores(nn.Module):
    """Reads the weight of a table that it is given, as Perceiver's and DeBERTa's heads do."""

    def forward(self, x, table):
        return x @ table.weight.T


class HandsOver(nn.Module):
    """Gives one of its layers to a module, another to a method, and a third to what only calls it."""

    def __init__(self):
        super().__init__()
        self.inner = nn.ModuleDict({"words": nn.Embedding(8, 4)})
        self.places, self.called, self.told = nn.Embedding(8, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.scores = Scores()

    def bound(self, x, other):
        return x @ other.weight.T

    def forward(self, x):
        x = checkpoint(self.called, self.told(x), use_reentrant=False)
        return self.scores(x, table=self.inner.words) + self.bound(x, self.places)


def test_weights_of_layers_that_are_handed_over_are_seen():
    assert tensor_parallel.known(HandsOver(), smallest_bytes=0, ranks=2) == ["told"]


def joined(x, layers):
    return nn.functional.linear(x, torch.cat([layer.weight for layer in layers]))


def score(hidden, layer):
    return joined(hidden, [layer])


class HandsToFunctions(nn.Module):
    """Gives layers to functions of its module, one in a list, and to one that it defines; others it calls."""

    def __init__(self):
        super().__init__()
        self.queries, self.keys, self.head, self.gate, self.told = (nn.Linear(4, 4) for _ in range(5))

    def forward(self, x):
        scaled = lambda layer, given: nn.functional.linear(given, layer.weight * 2)  # noqa: E731 - as in libraries
        return score(joined(self.told(x), [self.queries, self.keys]), self.head) + scaled(self.gate, x)


def test_weights_of_layers_that_functions_are_given_are_seen():
    assert tensor_parallel.known(HandsToFunctions(), smallest_bytes=0, ranks=2) == ["told"]


def as_it_is(method):
    @functools.wraps(method)
    def wrapped(self, x):
        return method(self, x)

    return wrapped


class ReadsInDecorated(nn.Module):
    """Reads weights in methods that are decorated, and in properties."""

    def __init__(self):
        super().__init__()
        self.decorated, self.property, self.cached, self.untouched = (nn.Linear(4, 8) for _ in range(4))

    @property
    def half(self):
        return self.property.weight * 0.5

    @functools.cached_property
    def rows(self):
        return len(self.cached.weight)

    @as_it_is
    def forward(self, x):
        return self.decorated.weight @ x.T, self.half @ x.T, self.untouched(x) * self.rows


def test_weights_that_are_read_in_decorated_methods_and_properties_are_seen():
    assert tensor_parallel.known(ReadsInDecorated(), smallest_bytes=0, ranks=2) == ["untouched"]


class Adapts(nn.Module):
    """Takes all parameters of some of its layers on the way from forward; of others' first ones the dtype, or later."""

    def __init__(self):
        super().__init__()
        self.adapted, self.averaged, self.asked, self.counted = (nn.Linear(4, 8) for _ in range(4))

    def forward(self, x):
        self._follow()
        names = dict(self.adapted.named_parameters())
        weights = {name: weight * 0.5 for name, weight in names.items()}
        return functional_call(self.adapted, weights, x), self.asked(x).to(next(self.asked.parameters()).dtype)

    def _follow(self):
        for one in self.averaged.parameters():
            one.data = one.data * 0.9

    def count(self):
        return sum(one.numel() for one in self.counted.parameters())


def test_layers_all_of_whose_parameters_forward_takes_stay_whole_unless_asked_for():
    assert tensor_parallel.known(Adapts(), smallest_bytes=0, ranks=2) == ["asked", "counted"]


def lent_wholes(model, wholes):
    """The loss that wholes give which a model is lent, and their gradients."""
    output = functional_call(model, wholes, ids(2, 5, seed=0))
    loss = square(output) + sum(whole.pow(2).sum() for whole in wholes.values())
    return loss, torch.autograd.grad(loss, [*wholes.values()])


@on_ranks(2, 3)
def test_layers_that_are_lent_whole_weights_give_the_numbers_and_gradients_of_one_process():
    axis, reference = model_axis(), layers()
    wholes = {name: (0.9 * p.detach()).requires_grad_() for name, p in reference.named_parameters()}
    wanted, gradients = lent_wholes(reference, wholes)
    for select in (None, {"0": "vocabulary", "1": "auto"}):
        model = tensor_parallel.apply(layers(), axis, select=select, smallest_bytes=0)
        loss, found = lent_wholes(model, wholes)
        assert loss.item() == pytest.approx(wanted.item(), rel=1e-12)
        for (name, whole), gradient, expected in zip(wholes.items(), found, gradients, strict=True):
            assert (gradient - expected).abs().max() < 1e-12 * max(1.0, expected.abs().max().item()), name
            assert whole.shape == expected.shape
        assert functional_call(model, dict(model.named_parameters()), ids(2, 5, seed=0)).shape == (2, 5, 6)


def test_to_see_which_weights_are_read_computes_none():
    model, asked = Reads(), []

    class Counts(nn.Module):
        def forward(self, weight):
            asked.append(1)
            return weight

    parametrize.register_parametrization(model.words, "weight", Counts())
    asked.clear()
    assert "body" in tensor_parallel.known(model, smallest_bytes=0, ranks=2)
    assert not asked


def by_hook(module):
    return nn.utils.spectral_norm(module)


def adapted(layer):
    """A layer with an adapter around it, which shows the layer's weight as its own."""
    shown = {name: property(lambda self, name=name: getattr(self.layer, name)) for name in ("weight", "bias")}
    kind = type("Adapted", (nn.Linear,), shown)
    made = kind.__new__(kind)
    nn.Module.__init__(made)
    made.layer, made.in_features, made.out_features = layer, layer.in_features, layer.out_features
    return made


@on_ranks(2)
def test_a_layer_with_an_adapter_around_it_is_not_cut():
    model = nn.Sequential(adapted(nn.Linear(4, 4)))
    with pytest.raises(ModelError, match=r"^0 has the weight of another module, as an adapter around a layer does"):
        tensor_parallel.apply(model, tulle.init(model=-1)["model"], select={"0": "column"})
    assert model[0].weight.shape == (4, 4)


class Around(nn.Module):
    """An adapter around a layer, which shows nothing of it."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.down = layer, nn.Linear(layer.in_features, 1, bias=False)

    def forward(self, x):
        return self.layer(x) + self.down(x)


class Instead(nn.Linear):
    """An adapter that is a layer, and adds something to what it gives."""

    def __init__(self, layer):
        super().__init__(layer.in_features, layer.out_features)
        self.down = nn.Linear(layer.in_features, 1, bias=False)

    def forward(self, x):
        return super().forward(x) + self.down(x)


def patched(layer):
    layer.forward = lambda x: nn.functional.linear(x, layer.weight, layer.bias) * 2
    return layer


@on_ranks(2)
@pytest.mark.parametrize(
    ("name", "adapter"),
    [("linear1", Around), ("linear1", patched), ("linear2", Around), ("linear2", Instead), ("linear2", patched)],
    ids=lambda one: getattr(one, "__name__", one),
)
def test_a_layer_that_computes_something_of_its_own_is_not_cut_as_if_it_did_not(name, adapter):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True).double()
    setattr(layer, name, adapter(getattr(layer, name)).double())
    with pytest.raises(ModelError, match=r"^0 has a (Around|Instead|Linear) with a forward of its own where an nn.Lin"):
        tensor_parallel.apply(copy.deepcopy(nn.Sequential(layer)), model_axis(), select=["0"])
    if adapter is not patched:  # whose copy computes with the parameters of what it was copied of
        check_exact(layer, lambda model, step: square(model(numbers(2, 3, 4, seed=step))))
        cut = {*tensor_parallel.placements(layer)}
        assert ({"self_attn.in_proj_weight", "linear1.weight", "linear2.weight"} - {f"{name}.weight"}) <= cut


class Checkpointed(nn.Module):
    """What is put around a layer and has no parameters of its own."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return checkpoint(self.layer, x, use_reentrant=False)


@on_ranks(2)
def test_an_adapter_that_is_put_around_a_split_layer_afterwards_is_refused():
    model = tensor_parallel.apply(layers(), model_axis())
    for name in ("linear1", "linear2"):
        with pytest.raises(
            ModelError, match=f"^a Around with parameters of its own was put around '{name}' of a Trans"
        ):
            setattr(model[1], name, Around(getattr(model[1], name)))
        setattr(model[1], name, Checkpointed(getattr(model[1], name)))
    layers_loss(model, 0).backward()


def by_parametrization(module):
    return nn.utils.parametrizations.weight_norm(module)


@on_ranks(2)
@pytest.mark.parametrize("make_weight", [by_hook, by_parametrization], ids=lambda make: make.__name__)
def test_layers_whose_weights_are_made_of_others_stay_whole(make_weight):
    model = layers()
    make_weight(model[1].linear1)
    make_weight(model[2])
    check_exact(model, layers_loss)
    assert set(tensor_parallel.placements(model)) & {"1.linear2.weight", "1.self_attn.in_proj_weight"}
    with pytest.raises(ModelError, match="2 has no parameter weight: it is made of others"):
        tensor_parallel.apply(nn.ModuleDict({"2": make_weight(nn.Linear(4, 4))}), model_axis(), select={"2": "column"})
