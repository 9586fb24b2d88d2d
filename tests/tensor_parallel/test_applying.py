"""What can be selected, what is refused, and what stays as it was: names, weights, optimizers, copies."""

import copy

import pytest
import torch
from split_layers import layers, layers_loss, model_axis
from split_training import check_exact, ids, numbers, square, train
from torch import nn
from torch.nn import functional

import tulle
from ranks import on_ranks
from tulle import tensor_parallel
from tulle.errors import MeshError, ModelError
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


def gated_loss(model, step):
    return square(model(numbers(5, 6, seed=step)))


@on_ranks(2, 3, 4)
def test_a_class_of_the_users_own_is_split_by_its_factory():
    tensor_parallel.register(Gated, split_gated)
    torch.manual_seed(0)
    check_exact(nn.Sequential(Gated(), nn.LayerNorm(6), Gated()).double(), gated_loss)


class Sloped(Gated):
    """A buffer has a number for each inner feature, as ALiBi's slopes are one a head."""

    def __init__(self, *, persistent: bool = False) -> None:
        super().__init__()
        self.register_buffer("slopes", torch.arange(10.0) / 7, persistent=persistent)

    def forward(self, x):
        return self.down(self.up(x) * self.slopes * self.gate(x).sigmoid())


def split_sloped(module: Sloped, to: tensor_parallel.Splitter) -> None:
    split_gated(module, to)
    to.cut(module, "slopes", dim=0)


@on_ranks(2, 3)
def test_a_buffer_is_cut_that_no_checkpoint_has():
    tensor_parallel.register(Sloped, split_sloped)
    torch.manual_seed(0)
    check_exact(nn.Sequential(Sloped(), nn.LayerNorm(6)).double(), gated_loss)
    with pytest.raises(ModelError, match=r"has a buffer slopes, of which each checkpoint .* persistent=False"):
        tensor_parallel.apply(nn.Sequential(Sloped(persistent=True)), model_axis(), select=["0"])


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


@on_ranks(2)
def test_the_check_is_without_dropout_and_leaves_the_model_in_training():
    model = nn.Sequential(nn.Linear(6, 10), nn.Dropout(0.5), nn.Linear(10, 6)).double()
    chosen = {"0": "column", "2": "row"}
    tensor_parallel.apply(model, model_axis(), select=chosen, sample=numbers(5, 6, seed=0), check=True)
    assert all(module.training for module in model.modules())


@on_ranks(2)
def test_a_state_is_of_parts_within_the_context_and_whole_after_it():
    model = nn.Sequential(nn.Linear(6, 10))
    tensor_parallel.apply(model, model_axis(), select={"0": "column"})
    with tensor_parallel.state_of_parts():
        assert model.state_dict()["0.weight"].shape == (5, 6)
    assert model.state_dict()["0.weight"].shape == (10, 6)


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
    with pytest.raises(ModelError, match="was given 3 as the factory of Linear, expected a function of a module"):
        tensor_parallel.register(nn.Linear, 3)
    with pytest.raises(ModelError, match=r"tensor_parallel\.apply was given a NoneType, expected a torch\.nn\.Module"):
        tensor_parallel.apply(None, axis)
    with pytest.raises(MeshError, match=r"tensor_parallel\.apply was given a str as axis, expected one of a mesh"):
        tensor_parallel.apply(layers(), "model")
    with (
        pytest.raises(MeshError, match=r"tensor_parallel\.enabled was given a Mesh as axis"),
        tensor_parallel.enabled(tulle.init(model=2)),
    ):
        layers()
    with pytest.raises(ModelError, match="sparse gradients, which is not split over a model axis"):
        tensor_parallel.apply(nn.Sequential(nn.Embedding(8, 2, sparse=True)), axis, select=["0"])
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(6, 6, 10, batch_first=True), 2)
    with pytest.raises(ModelError, match="no stack of layers in the Sequential is selected: have select name '0'"):
        tensor_parallel.apply(nn.Sequential(encoder), axis, select=["0.layers.*"], sequence=True)
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


@on_ranks(2)
def test_a_layer_is_given_its_input_by_name():
    model, x = layers()[2], numbers(3, 6, seed=0)
    expected = model(input=x)
    tensor_parallel.apply(model, model_axis(), smallest_bytes=0)
    assert torch.allclose(model(input=x), expected, rtol=1e-12)


class Dropping(nn.Module):
    """Drops parts between its layers, and whole activations behind them; a width that ranks do not divide."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(6, 7), nn.Linear(6, 7), nn.Linear(7, 6)
        self.share = 0.3

    def forward(self, x):
        hidden = functional.dropout(self.up(x).sigmoid() * self.gate(x), self.share, self.training)
        return functional.dropout(self.down(hidden), 0.2, self.training)


@on_ranks(2)
def test_what_is_dropped_between_layers_that_names_select_leaves_ranks_in_step():
    axis = model_axis()
    torch.manual_seed(0)
    model = nn.Sequential(Dropping(), Dropping()).double()
    tensor_parallel.apply(model, axis, select={"*.up": "column", "*.gate": "column", "*.down": "row"})
    copied, kept = copy.deepcopy(model), []
    model[0].down.register_forward_pre_hook(lambda _, inputs: kept.append(inputs[0].detach()[:, :3] != 0))
    for network in (model, copied):
        losses = [network(numbers(64, 6, seed=step)).pow(2).mean().item() for step in range(3)]
        first, second = tulle.comm.gather_values((losses, torch.get_rng_state().tolist()), axis, label="test")
        assert first == second, "what ranks hold alike is dropped alike"
    masks = tulle.comm.gather_values(kept[0].tolist(), axis, label="test")
    assert masks[0] != masks[1], "and what they have parts of, unlike"
    assert not torch.equal(kept[0], kept[1])
    model[0].share = 2.0
    with pytest.raises(ValueError, match="dropout probability"):
        model(numbers(64, 6, seed=0))
    first, second = tulle.comm.gather_values(torch.get_rng_state().tolist(), axis, label="test")
    assert first == second, "a forward that fails on its way leaves the shared numbers to all"


@on_ranks(2)
def test_layers_between_which_nobody_draws_leave_the_shared_numbers_alone():
    axis, found = model_axis(), []
    for select in ({"*.up": "column", "*.gate": "column", "*.down": "row"}, None):
        torch.manual_seed(0)
        model = nn.Sequential(Dropping(), Dropping()).double()
        if select is not None:
            tensor_parallel.apply(model, axis, select=select)
        for block in model:
            block.share = 0.0
        torch.manual_seed(1)
        found.append(model(numbers(5, 6, seed=0)).pow(2).mean().item())
    assert found[0] == pytest.approx(found[1], rel=1e-12)
