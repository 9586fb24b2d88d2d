"""What can be selected, what is refused, and what stays as it was: names, weights, optimizers, copies."""

import copy
import functools

import pytest
import torch
from split_training import check_exact, ids, numbers, square, train
from torch import nn
from torch.func import functional_call
from torch.nn import functional
from torch.nn.utils import parametrize

import tulle
from ranks import on_ranks
from tulle import tensor_parallel
from tulle.errors import ModelError
from tulle.tensor_parallel.dropout import OwnRandomness
from tulle.tensor_parallel.region import Region


class Gated(nn.Module):
    """A network of a shape that no registry knows."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(6, 10), nn.Linear(6, 10), nn.Linear(10, 6)

    def forward(self, x):
        return self.down(self.up(x) * self.gate(x).sigmoid())


def split_gated(module: Gated, to: tensor_parallel.Splitter) -> None:
    to.enter(module, "x")
    to.column(module.up)
    to.column(module.gate)
    to.row(module.down)


def forgetful(module: Gated, to: tensor_parallel.Splitter) -> None:
    to.column(module.up)
    to.column(module.gate)
    to.row(module.down)


def layers(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Embedding(50, 6), nn.TransformerEncoderLayer(6, 6, 10, 0.0, batch_first=True), nn.Linear(6, 6)
    ).double()


def gated_loss(model, step):
    return square(model(numbers(5, 6, seed=step)))


def layers_loss(model, step):
    return square(model(ids(2, 5, seed=step)))


def model_axis():
    return tulle.init(model=-1)["model"]


@on_ranks(2, 3, 4)
def test_a_class_of_the_users_own_is_split_by_its_factory():
    tensor_parallel.register(Gated, split_gated)
    torch.manual_seed(0)
    check_exact(nn.Sequential(Gated(), nn.LayerNorm(6), Gated()).double(), gated_loss)


@on_ranks(2)
def test_the_check_names_what_a_wrong_factory_breaks():
    axis = model_axis()
    tensor_parallel.register(Gated, forgetful)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), Gated()).double()
    with pytest.raises(ModelError, match=r"differs from the whole one: gradient of 0\.\w+ by \d"):
        tensor_parallel.apply(model, axis, sample=numbers(5, 6, seed=0), check=True)
    with pytest.raises(ModelError, match="check=True without a sample"):
        tensor_parallel.apply(model, axis, check=True)


@on_ranks(2, 3)
def test_a_state_is_whole_and_can_be_loaded_whole():
    axis = model_axis()
    model, other = layers(0), layers(1)
    expected = copy.deepcopy(other.state_dict())
    tensor_parallel.apply(model, axis, smallest_bytes=0)
    held = sum(p.numel() for p in model.parameters())
    assert held < 0.6 * sum(value.numel() for value in expected.values())
    model.load_state_dict(other.state_dict())
    found = model.state_dict()
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in other.named_parameters()]


@on_ranks(2)
def test_an_optimizer_made_before_goes_on():
    axis = model_axis()
    model, reference = layers(), layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tensor_parallel.apply(model, axis, smallest_bytes=0)
    layers_loss(model, 0).backward()
    optimizer.step()
    layers_loss(reference, 0).backward()
    torch.optim.SGD(reference.parameters(), lr=0.1).step()
    expected = reference.state_dict()
    assert all((value - expected[name]).abs().max() < 1e-12 for name, value in model.state_dict().items())


@on_ranks(2)
def test_a_copy_computes_the_same():
    model = tensor_parallel.apply(layers(), model_axis(), smallest_bytes=0)
    twin = copy.deepcopy(model)
    assert layers_loss(model, 0).item() == layers_loss(twin, 0).item()
    assert tensor_parallel.placements(twin) == tensor_parallel.placements(model)


@on_ranks(2, 3)
def test_models_made_within_the_context_are_those_of_one_process():
    axis = model_axis()
    reference = layers()
    with tensor_parallel.enabled(axis, smallest_bytes=0):
        model = layers()
    assert tensor_parallel.placements(model)
    losses, _ = train(model, layers_loss)
    expected, _ = train(reference, layers_loss)
    assert losses == pytest.approx(expected, rel=1e-12)


@on_ranks(2)
def test_parameters_tied_between_models_of_one_context_are_cut_once():
    axis = model_axis()
    reference = layers()
    with tensor_parallel.enabled(axis, smallest_bytes=0):
        model, head = layers(), nn.Linear(6, 50, bias=False).double()
        head.weight = model[0].weight
    found = head(model(ids(2, 5, seed=0)))
    expected = functional.linear(reference(ids(2, 5, seed=0)), reference[0].weight)
    assert (found - expected).abs().max() < 1e-12


@on_ranks(2)
def test_a_model_on_meta_takes_its_parts_of_what_is_loaded():
    axis = model_axis()
    reference = layers()
    with torch.device("meta"), tensor_parallel.enabled(axis, smallest_bytes=0):
        model = layers()
    model.to_empty(device="cpu").load_state_dict(reference.state_dict())
    assert layers_loss(model, 0).item() == pytest.approx(layers_loss(reference, 0).item(), rel=1e-12)


@on_ranks(2)
def test_what_cannot_be_selected_is_refused_by_name():
    axis = model_axis()
    refusals = {
        "the pattern 'layer.*' matches no module": {"select": ["layer.*"]},
        "found nothing to split": {"select": ["2.nothing", "2"], "smallest_bytes": 0} | {"select": {"2": "whole"}},
        'select says "row" for 0, a Embedding': {"select": {"0": "row"}},
        "select says 'rows' for '2', expected one of auto, whole": {"select": {"2": "rows"}},
        "no stack of layers in the Sequential is known": {"sequence": True},
    }
    for text, options in refusals.items():
        with pytest.raises(ModelError, match=text):
            tensor_parallel.apply(layers(), axis, **options)
    with pytest.raises(ModelError, match=r"was given 3, expected a subclass of nn\.Module"):
        tensor_parallel.register(3, split_gated)
    with pytest.raises(ModelError, match="sparse gradients, which is not split over a model axis"):
        tensor_parallel.apply(nn.Sequential(nn.Embedding(8, 2, sparse=True)), axis, select=["0"])
    two = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    tensor_parallel.apply(two, axis, smallest_bytes=0, leave="1")  # one name, not its letters
    assert [len(one.weight) for one in two] == [2, 4]
    twice = tensor_parallel.apply(layers(), axis, select="1")
    with pytest.raises(ModelError, match=r"^1\.self_attn was split before: call tensor_parallel\.apply once"):
        tensor_parallel.apply(twice, axis, select=["2"])
    with pytest.raises(ModelError, match=r"too short along dimension 0 for the 2 ranks"):
        tensor_parallel.apply(nn.Sequential(nn.Linear(4, 1)), axis, select=["0"])


@on_ranks(1)
def test_a_forward_that_was_stopped_leaves_the_shared_numbers_alone_afterwards():
    randomness = OwnRandomness(Region(model_axis(), "test"))
    module = nn.Dropout()
    randomness.begin(module)  # and no end: recomputation stops as soon as it has what it needs
    torch.manual_seed(0)
    randomness.begin(module.eval())
    randomness.end()
    assert torch.initial_seed() == 0
    assert torch.rand(()).item() == torch.rand((), generator=torch.Generator().manual_seed(0)).item()


@on_ranks(1, 2, 3, 4)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_cross_entropy_of_split_scores_is_that_of_whole_ones(reduction, smoothing):
    axis = model_axis()
    scores, targets = 5 * numbers(7, 11, seed=0), ids(7, seed=1, words=11)
    targets[3] = -100
    whole = scores.clone().requires_grad_()
    part = scores.tensor_split(axis.size, 1)[axis.rank].clone().requires_grad_()
    options = {"reduction": reduction, "label_smoothing": smoothing}
    expected = functional.cross_entropy(whole, targets, **options)
    found = tensor_parallel.cross_entropy(part, targets, axis, words=11, **options)
    assert (found - expected).abs().max() < 1e-12
    square(expected).backward()
    square(found).backward()
    assert (part.grad - whole.grad.tensor_split(axis.size, 1)[axis.rank]).abs().max() < 1e-12
    with pytest.raises(ModelError, match=r"scores \[7, 12\] for 7 targets"):
        tensor_parallel.cross_entropy(numbers(7, 12, seed=0), targets, axis, words=11)


@on_ranks(2)
def test_only_sums_of_activations_travel():
    """Two all-reduces forward and two backward for a layer, as Megatron's; nothing for the weights."""
    axis = model_axis()
    torch.manual_seed(0)
    model = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)).double()
    tensor_parallel.apply(model, axis)
    x = numbers(3, 5, 8, seed=0).requires_grad_()
    before = tulle.comm.traffic.sent_for("0").bytes_sent
    model(x).sum().backward()
    assert tulle.comm.traffic.sent_for("0").bytes_sent - before == 4 * x.nbytes


class Scaled(nn.Embedding):
    """A table of a class of its own, as BART's."""

    def forward(self, input):
        return super().forward(input) * 2.0


def test_a_layer_that_is_tied_to_a_module_of_an_unknown_class_stays_whole_unless_asked_for():
    model = nn.Sequential(Scaled(8, 4), nn.Linear(4, 4, bias=False), nn.Linear(4, 8, bias=False))
    assert tensor_parallel.known(model, smallest_bytes=0, ranks=2) == ["1", "2"]
    model[2].weight = model[0].weight
    assert tensor_parallel.known(model, smallest_bytes=0, ranks=2) == ["1"]


def test_a_head_that_names_the_bias_of_its_layer_again_leaves_it_and_the_table_tied_to_it_whole():
    head = nn.Module()
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


@on_ranks(2)
def test_a_layer_that_is_lent_whole_weights_by_another_name_says_so():
    axis, model = model_axis(), nn.Sequential(nn.Linear(4, 8))
    lent = {name: value.detach().clone() for name, value in model.named_parameters()}
    tensor_parallel.apply(model, axis, select={"0": "auto"})
    with pytest.raises(ModelError, match=r"0 gives 8 features where a rank's part of it has 4.*functional_call"):
        functional_call(model, lent, torch.ones(2, 4))


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


@on_ranks(2)
def test_a_layer_of_which_a_loss_of_before_is_still_there_is_split():
    check_applied(lambda model: None)


@pytest.mark.slow
@on_ranks(2)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_a_compiled_layer_is_split():
    check_applied(lambda model: model[0].compile(backend="eager"))


def check_applied(change):
    axis = model_axis()
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double()
    kept = model(numbers(3, 4, seed=0)).sum()
    kept.backward(retain_graph=True)
    wanted = model[0].weight.grad
    tensor_parallel.apply(model, axis, smallest_bytes=0)
    change(model)
    found = model(numbers(3, 4, seed=0)).sum()
    found.backward()
    assert found.item() == pytest.approx(kept.item(), rel=1e-12)
    assert (model[0].weight.grad - wanted.tensor_split(2)[axis.rank]).abs().max() < 1e-12


@on_ranks(2)
def test_what_is_no_word_is_refused_as_by_torch():
    axis = model_axis()
    words = tensor_parallel.apply(nn.Embedding(10, 4), axis, smallest_bytes=0)
    for other in (-1, 10, 13):
        with pytest.raises(IndexError, match="index out of range"):
            words(torch.tensor([1, other]))
        with pytest.raises(RuntimeError, match="out of bounds"):
            tensor_parallel.cross_entropy(numbers(2, 5, seed=0), torch.tensor([1, other]), axis, words=10)


@on_ranks(2)
def test_scores_of_half_precision_are_summed_in_float32():
    axis = model_axis()
    scores, targets = numbers(16, 4000, seed=0).bfloat16(), ids(16, seed=1, words=4000)
    found = tensor_parallel.cross_entropy(scores.tensor_split(2, 1)[axis.rank], targets, axis, words=4000)
    torch.testing.assert_close(found, functional.cross_entropy(scores.float(), targets), rtol=1e-5, atol=1e-6)


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


@on_ranks(2)
def test_the_check_leaves_modes_as_they_are():
    model = layers()
    model[1].eval()
    tensor_parallel.apply(model, model_axis(), smallest_bytes=0, sample=ids(2, 5, seed=0), check=True)
    assert [module.training for module in model] == [True, False, True]


class Fails(nn.Linear):
    def forward(self, input):
        raise ValueError("mine")


@on_ranks(1)
def test_an_error_within_a_stretch_of_own_numbers_ends_it():
    model = nn.Sequential(nn.Linear(2, 2), Fails(2, 2))
    tensor_parallel.Splitter(model_axis()).own_randomness(model, end=model[1])
    torch.manual_seed(0)
    with pytest.raises(ValueError, match="mine"):
        model(torch.ones(1, 2))
    assert torch.initial_seed() == 0


@on_ranks(2)
def test_attention_takes_no_samples_and_no_hint_without_a_mask():
    attention = nn.MultiheadAttention(6, 2)
    tensor_parallel.apply(attention, model_axis())
    none = torch.empty(5, 0, 6)
    assert attention(none, none, none, attn_mask=torch.zeros(0, 5, 5))[0].shape == (5, 0, 6)
    with pytest.raises(ModelError, match="it is a hint about a mask"):
        attention(none, none, none, is_causal=True)
