"""The promise of tensor parallelism for `torch.nn`: loss, gradients and parameters of one process."""

import copy
import logging

import pytest
import torch
from split_training import check_exact, differences, ids, numbers, square
from torch import nn
from torch.nn import functional

import tulle
from ranks import on_ranks
from tulle import tensor_parallel
from tulle.errors import GradientError, ModelError
from tulle.tensor_parallel.splitter import Splitter


class Network(nn.Module):
    """A feed-forward network whose inner width divides by none of the numbers of ranks."""

    def __init__(self, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 13), nn.Linear(13, 5)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return self.down(self.dropout(torch.tanh(self.up(x))))


class Words(nn.Module):
    """A language model with a tied table of 50 rows, which 4 ranks do not divide, and a stack of encoder layers."""

    def __init__(self, *, tied: bool = True, dropout: float = 0.0, batch_first: bool = True) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 24, padding_idx=0)
        layer = nn.TransformerEncoderLayer(24, 12, 20, dropout, batch_first=batch_first, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, nn.LayerNorm(24), enable_nested_tensor=False)
        self.out = nn.Linear(24, 50)
        self.batch_first = batch_first
        if tied:
            self.out.weight = self.words.weight

    def forward(self, words):
        x = self.words(words)
        x = x if self.batch_first else x.transpose(0, 1)
        mask = nn.Transformer.generate_square_subsequent_mask(words.shape[1], dtype=torch.float64)
        padding = torch.zeros(words.shape, dtype=torch.bool)
        padding[0, -2:] = True
        x = self.encoder(x, mask=mask, src_key_padding_mask=padding.double().masked_fill(padding, -1e9))
        return self.out(x if self.batch_first else x.transpose(0, 1))


def make(kind, **options):
    torch.manual_seed(0)
    return kind(**options).double()


def words_loss(model, step):
    words = ids(2, 13, seed=step)
    return functional.cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())


def network_loss(model, step):
    return square(model(numbers(7, 6, seed=step)))


@on_ranks(1, 2, 3, 4)
@pytest.mark.parametrize(
    "select",
    [None, {"up": "column", "down": "row"}, {"up": "auto"}, {"down": "auto"}],
    ids=["all", "pair", "up", "down"],
)
def test_linear_layers_of_any_width_are_split(select):
    check_exact(make(Network), network_loss, select=select)


@on_ranks(1, 2, 3, 4)
@pytest.mark.parametrize(("tied", "smallest_bytes"), [(True, 50 * 24 * 8), (False, 0)])  # of the table, not of its part
def test_a_language_model_is_split(tied, smallest_bytes):
    check_exact(make(Words, tied=tied), words_loss, smallest_bytes=smallest_bytes)


@on_ranks(2, 3, 4)
@pytest.mark.parametrize("batch_first", [True, False])
def test_a_language_model_is_split_along_sequences_too(batch_first):
    check_exact(make(Words, batch_first=batch_first), words_loss, sequence=True)


@on_ranks(2, 4)
def test_dropout_in_feed_forward_layers_is_that_of_one_process():
    model = make(Words, dropout=0.3)
    for module in model.modules():
        if isinstance(module, nn.MultiheadAttention):
            module.dropout = 0.0  # inside attention, each rank draws numbers of its own
    check_exact(model, words_loss)


@on_ranks(2, 4)
def test_dropout_along_sequences_is_that_of_one_process():
    model = make(Words, dropout=0.3)
    for module in model.modules():
        if isinstance(module, nn.MultiheadAttention):
            module.dropout = 0.0
    check_exact(model, words_loss, sequence=True)


@on_ranks(2)
def test_dropout_inside_attention_leaves_ranks_in_step_and_differs_between_them(monkeypatch):
    axis = tulle.init(model=-1)["model"]
    model = tensor_parallel.apply(make(Words, dropout=0.5), axis)
    seeds, attend = [], functional.scaled_dot_product_attention
    monkeypatch.setattr(
        functional, "scaled_dot_product_attention", lambda *a: (seeds.append(torch.initial_seed()), attend(*a))[1]
    )
    torch.manual_seed(1)
    loss = words_loss(model, 0)
    state = torch.get_rng_state()
    gathered = tulle.comm.gather_values((loss.item(), state.tolist()), axis, label="test")
    assert gathered[0] == gathered[1]
    first, second = tulle.comm.gather_values(seeds, axis, label="test")
    assert first, "there are layers of attention"
    assert len({*first, *second}) == 2 * len(first), "no two draw the same numbers, on one rank or on two"
    assert loss.item() != words_loss(model, 0).item()


def memory_loss(model, step):
    source, target = numbers(2, 5, 12, seed=step), numbers(2, 8, 12, seed=step + 10)
    return square(model(source, target, tgt_mask=nn.Transformer.generate_square_subsequent_mask(8).double()))


@on_ranks(2, 4)
def test_an_encoder_and_decoder_are_split():
    torch.manual_seed(0)
    model = nn.Transformer(12, 4, 1, 2, 20, 0.0, batch_first=True).double()
    check_exact(model, memory_loss)


class Attending(nn.Module):
    """Attention with keys and values of other widths, and results that tell the weights."""

    def __init__(self, *, kdim, bias, batch_first) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(12, 4, bias=bias, kdim=kdim, vdim=kdim, batch_first=batch_first)
        self.kdim = kdim or 12

    def forward(self, step):
        query, key = numbers(4, 4, 12, seed=step), numbers(4, 4, self.kdim, seed=step + 20)
        key = query if self.kdim == 12 and step else key
        mask = numbers(16, 4, 4, seed=step + 30)
        padding = numbers(4, 4, seed=3) > 1
        output, weights = self.attention(
            query, key, key, attn_mask=mask, key_padding_mask=torch.zeros(4, 4).double().masked_fill(padding, -9.0)
        )
        return output.pow(2).sum() + weights.pow(2).sum()


def attending_loss(model, step):
    return model(step)


@on_ranks(2)
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize(("kdim", "bias"), [(None, True), (7, True), (7, False), (None, False)])
def test_attention_is_split_by_heads(kdim, bias, batch_first):
    torch.manual_seed(0)
    check_exact(Attending(kdim=kdim, bias=bias, batch_first=batch_first).double(), attending_loss)


class Biased(nn.Module):
    """Masks that are trained: a bias of positions and one of each head, and one that is worked out of the keys."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(12, 4, 20, 0.0, batch_first=True)
        self.attention = nn.MultiheadAttention(12, 4, batch_first=True)
        self.gate = nn.Linear(12, 1)
        self.bias, self.of_heads = nn.Parameter(numbers(4, 4, seed=1)), nn.Parameter(numbers(4, 4, 4, seed=2))

    def forward(self, step):
        x = numbers(3, 4, 12, seed=step)
        x = self.layer(x, self.bias, self.gate(x).squeeze(-1))
        return square(self.attention(x, x, x, attn_mask=self.of_heads.repeat(3, 1, 1))[0])


@on_ranks(2)
def test_masks_that_are_trained_have_the_gradients_of_all_heads():
    torch.manual_seed(0)
    check_exact(Biased().double(), attending_loss, select=["layer", "attention"])


def activated_loss(model, step):
    return square(model(numbers(3, 4, 12, seed=step)))


@on_ranks(2)
@pytest.mark.parametrize("sequence", [False, True])
def test_an_activation_that_is_trained_has_the_gradient_of_all_features(sequence):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(12, 4, 20, 0.0, nn.PReLU(), batch_first=True).double()
    check_exact(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), activated_loss, sequence=sequence)


class OwnLayer(nn.TransformerEncoderLayer):
    """Of a class that nobody knows, with torch's forward."""


@on_ranks(2)
@pytest.mark.parametrize("kind", [nn.TransformerEncoderLayer, OwnLayer])
def test_inference_without_gradients_takes_no_fused_path(kind):
    axis = tulle.init(model=-1)["model"]
    torch.manual_seed(0)
    layer = kind(8, 4, 16, 0.0, batch_first=True).double()  # with an even number of heads on each rank, as torch wants
    model = nn.TransformerEncoder(layer, 2).eval()
    x, padding = numbers(2, 4, 8, seed=0), torch.tensor([[False] * 4, [False, False, True, True]])
    with torch.no_grad():
        expected = model(x)
        model.use_nested_tensor = False
        expected_padded = model(x, src_key_padding_mask=padding)
        model.use_nested_tensor = True
        tensor_parallel.apply(model, axis)
        assert (model(x) - expected).abs().max() < 1e-12
        found = model(x, src_key_padding_mask=padding)
    assert (found - expected_padded)[~padding].abs().max() < 1e-12


@on_ranks(2)
@pytest.mark.parametrize("broken", ["enter", "leave", "summed", "sections"])
def test_the_comparison_can_fail_where_a_rule_is_left_out(broken):

    axis = tulle.init(model=-1)["model"]
    region = tensor_parallel.splitter.Region
    with pytest.MonkeyPatch.context() as patch:
        if broken == "enter":
            patch.setattr(region, "enter", lambda self, x: x)
        elif broken == "leave":
            patch.setattr(region, "leave", lambda self, x: x)
        elif broken == "summed":
            patch.setattr(tensor_parallel.splitter, "summed_over", lambda *_: None)
        else:
            whole = tensor_parallel.splitter.Splitter.cut
            patch.setattr(
                tensor_parallel.splitter.Splitter,
                "cut",
                lambda self, module, name, dim, sections=None: whole(self, module, name, dim=dim),
            )
        model = make(Words)
        found = differences(
            model,
            words_loss,
            lambda one: tensor_parallel.apply(one, axis, sequence=broken == "summed", smallest_bytes=0),
        )
    assert max(found.values()) > 1e-4


def stack():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 12, 0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, nn.LayerNorm(8), enable_nested_tensor=False).double()


def penalized_norms(model, step):
    norms = [p for name, p in model.named_parameters() if "norm" in name]
    return square(model(numbers(2, 4, 8, seed=step))) + 0.1 * sum(p.pow(2).sum() for p in norms)


@on_ranks(2)
def test_a_penalty_of_what_is_whole_where_its_gradients_are_summed_counts_once():
    check_exact(stack(), penalized_norms, sequence=True)
    model, wanted = stack(), stack()
    copied = copy.deepcopy(tensor_parallel.apply(model, tulle.init(model=-1)["model"], sequence=True))
    for one in (copied, wanted):
        penalized_norms(one, 0).backward()
    found, gradient = (one.layers[0].norm1.weight.grad for one in (copied, wanted))
    assert torch.allclose(found, gradient, rtol=1e-10, atol=1e-12), "of a copy too"


@on_ranks(3)
def test_heads_that_do_not_divide_are_refused_by_name_if_asked_for_and_else_told_of():
    axis = tulle.init(model=-1)["model"]
    model = nn.Sequential(nn.TransformerEncoderLayer(8, 4, 16, 0.0, batch_first=True)).double()
    with pytest.raises(ModelError, match=r"^0 has 4 heads, which do not divide among the 3 ranks of axis 'model'"):
        tensor_parallel.apply(copy.deepcopy(model), axis, select=["0"])
    told, handler = [], logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    logging.getLogger("tulle").addHandler(handler)
    check_exact(model, lambda one, step: square(one(numbers(2, 5, 8, seed=step))), axis)
    logging.getLogger("tulle").removeHandler(handler)
    assert {*tensor_parallel.placements(model)} == {f"0.linear{n}.{own}" for n in (1, 2) for own in ("weight", "bias")}
    said = (
        "axis model splits each layer of 2 blocks for itself, which gathers what it gives: 0 has 4 heads, which do not"
    )
    assert [one.startswith(said) for one in told[:1]] == ([True] if axis.rank == 0 else [])


@on_ranks(2)
def test_dropout_of_parts_keeps_a_byte_of_each_number_for_backward():
    axis = tulle.init(model=-1)["model"]
    layer = tensor_parallel.apply(nn.TransformerEncoderLayer(8, 2, 64, 0.5), axis)
    x, saved = torch.ones(4, 8, 32, requires_grad=True), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.untyped_storage().nbytes()), lambda _: x):
        layer.dropout(x)
    assert sum(saved) == x.numel()


class Conv1D(nn.Module):
    """As that of transformers: a linear layer whose weight is `[in_features, out_features]`."""

    def __init__(self, features: int, inputs: int) -> None:
        super().__init__()
        self.nf = features
        self.weight, self.bias = nn.Parameter(torch.ones(inputs, features) / 7), nn.Parameter(torch.ones(features))

    def forward(self, x):
        return torch.addmm(self.bias, x, self.weight)


@on_ranks(2)
@pytest.mark.parametrize("kind", [nn.Linear, Conv1D])
def test_under_autocast_a_row_layer_gives_the_dtype_of_one_process(kind):
    axis = tulle.init(model=-1)["model"]
    torch.manual_seed(0)
    layer = nn.Linear(8, 6) if kind is nn.Linear else Conv1D(6, 8)
    split, x = copy.deepcopy(layer), torch.randn(3, 8)
    Splitter(axis).row(split)
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = split(x.chunk(2, 1)[axis.rank]), layer(x)
    assert found.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)


@on_ranks(2)
def test_a_layer_that_gives_all_features_says_how_many():
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5))
    tensor_parallel.apply(model, tulle.init(model=2)["model"], select=["2"])
    assert model(torch.ones(1, 4)).shape == (1, model[2].out_features) == (1, 5)


@on_ranks(2)
def test_norms_of_gradients_in_half_precision_are_as_large_as_these_may_be():
    def clipped(axis=None):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)).half()
        if axis is not None:
            tensor_parallel.apply(model, axis, select={"0": "column", "1": "row"})
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 100.0)
        clip = nn.utils.clip_grad_norm_ if axis is None else tensor_parallel.clip_grad_norm_
        return clip(model.parameters() if axis is None else model, 1.0).item(), model[0].weight.grad.max().item()

    assert clipped(tulle.init(model=-1)["model"]) == pytest.approx(clipped(), rel=1e-3)


@on_ranks(1, 2)
def test_norms_of_orders_without_sums_are_those_of_torch_or_refused_of_parts():
    for order in (0, -float("inf")):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        for number, parameter in enumerate(model.parameters()):
            parameter.grad = torch.full_like(parameter, float(number))
        alone = nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()], order)
        assert tensor_parallel.gradient_norm(model, order) == alone
        axis = tulle.init(model=-1)["model"]
        if axis.size > 1:
            model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
            tensor_parallel.apply(model, axis, select={"0": "column", "1": "row"})
            model(torch.ones(1, 4)).sum().backward()
            with pytest.raises(GradientError, match="no norm of order"):
                tensor_parallel.gradient_norm(model, order)
