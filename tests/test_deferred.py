"""A model that is built without memory gets the values, to the last bit, that it would have had."""

import copy
import logging

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import init
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tulle.deferred import deferred_init, give, is_deferred, materialize, needs, replay, values_of
from tulle.deferred.draws import can_draw_in_chunks, draw_in_chunks
from tulle.deferred.record import View
from tulle.errors import ModelError


class Positions(nn.Module):
    """Computed, not drawn."""

    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        place = torch.arange(length).float()[:, None]
        rate = torch.exp(torch.arange(0, width, 2) * (-9.0 / width))
        table = torch.zeros(length, width)
        table[:, 0::2] = torch.sin(place * rate)
        table[:, 1::2] = torch.cos(place * rate)
        self.register_buffer("table", table)


class Everything(nn.Module):
    """What constructors do."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(60, 8, padding_idx=3)
        init.xavier_uniform_(self.words.weight)
        self.bags = nn.EmbeddingBag(50, 8)
        self.layer = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
        self.positions = Positions(20, 8)
        self.big_positions = Positions(3000, 100)
        self.convolution = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm1d(8)
        self.recurrent = nn.LSTM(8, 5, 2)
        self.out = nn.Linear(8, 60, bias=False)
        self.out.weight = self.words.weight
        self.free = nn.Parameter(torch.randn(7, 3) * 0.02)
        self.orthogonal = nn.Parameter(torch.empty(5, 4))
        init.orthogonal_(self.orthogonal)
        self.sparse = nn.Parameter(init.sparse_(torch.empty(20, 5), 0.5))
        self.truncated = nn.Parameter(init.trunc_normal_(torch.empty(30, 5), std=0.5, a=-0.4, b=0.4))
        self.counts = nn.Parameter(torch.zeros(9))
        init.normal_(self.counts[2:4].data)
        self.halves = nn.Linear(6, 7, dtype=torch.bfloat16)
        self.wide = nn.Linear(3, 3).double()
        self.copied = copy.deepcopy(nn.Sequential(self.wide, self.norm))
        self.array = nn.Parameter(torch.from_numpy(np.arange(6.0)))
        self.rates = [float(rate) for rate in torch.linspace(0, 0.1, 4)]
        self.choice = nn.Parameter(torch.rand(4).clamp_(0.2, 0.8), requires_grad=False)
        for module in self.modules():
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.normal_(module.bias, std=0.1)
        with torch.no_grad():
            self.words.weight[5] = 1.5
            self.bags.weight.mul_(2).sub_(0.5)


def built(kind, *, seed: int = 5, **options) -> nn.Module:
    torch.manual_seed(seed)
    with deferred_init():
        model = kind(**options)
    return model


def assert_same(model: nn.Module, expected: nn.Module) -> None:
    theirs = expected.state_dict()
    assert model.state_dict().keys() == theirs.keys()
    for name, value in model.state_dict().items():
        assert torch.equal(value, theirs[name]), name
        assert (value.dtype, value.stride()) == (theirs[name].dtype, theirs[name].stride()), name


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


# Parameters by rows


class Taker:
    """Puts chunks together again."""

    def __init__(self) -> None:
        self.chunks: list[Tensor] = []
        self.rows = 0

    def __call__(self, first_row: int, chunk: Tensor) -> None:
        assert first_row == self.rows
        self.rows += len(chunk)
        self.chunks.append(chunk.clone())


class Table(nn.Module):
    def __init__(self, fill, rows: int = 1003, width: int = 3, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.before = nn.Linear(2, 2)
        self.weight = nn.Parameter(fill(rows, width, dtype))
        self.after = nn.Linear(2, 2)


def embedding(rows: int, width: int, dtype: torch.dtype) -> Tensor:
    return nn.Embedding(rows, width, padding_idx=4, dtype=dtype).weight.data


def embedding_drawn_anew(rows: int, width: int, dtype: torch.dtype) -> Tensor:
    return init.uniform_(nn.Embedding(rows, width, dtype=dtype).weight, -0.1, 0.2).data


def scaled(rows: int, width: int, dtype: torch.dtype) -> Tensor:
    return nn.init.normal_(torch.empty(rows, width, dtype=dtype), 1.0, 0.3).mul_(0.5).clamp_(0.1, 0.7)


def with_rows_set(rows: int, width: int, dtype: torch.dtype) -> Tensor:
    made = torch.randn(rows, width, dtype=dtype)
    made[-1] = 7
    made[100:400].zero_()
    return made


def zeros(rows: int, width: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(rows, width, dtype=dtype).zero_()


FILLS = [embedding, embedding_drawn_anew, scaled, with_rows_set, zeros]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("rows", [1003, 40, 5])
def test_a_parameter_that_is_kept_by_rows_has_the_values_of_the_whole(fill, dtype, rows, monkeypatch, caplog):
    monkeypatch.setattr(replay, "CHUNK_BYTES", 100 * dtype.itemsize)
    rows = max(rows, 401) if fill is with_rows_set else rows
    torch.manual_seed(5)
    expected = Table(fill, rows, dtype=dtype)
    model = built(Table, fill=fill, rows=rows, dtype=dtype)
    taker = Taker()
    materialize(model, keep={"weight": taker})
    assert caplog.messages == []
    assert torch.equal(torch.cat(taker.chunks), expected.weight)
    assert max(map(len, taker.chunks)) < 64, "never the whole"
    assert model.weight.is_meta
    give(model.weight, torch.cat(taker.chunks))
    assert_same(model, expected)


def by_columns(rows: int, width: int, dtype: torch.dtype) -> Tensor:
    made = torch.randn(rows, width, dtype=dtype)
    made[:, 1] = 0
    return made


def normalized(rows: int, width: int, dtype: torch.dtype) -> Tensor:
    return nn.functional.normalize(torch.randn(rows, width, dtype=dtype))


def truncated(rows: int, width: int, dtype: torch.dtype) -> Tensor:
    return init.trunc_normal_(torch.empty(rows, width, dtype=dtype))


def copied(rows: int, width: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(rows, width, dtype=dtype).copy_(torch.arange(rows)[:, None])


@pytest.mark.parametrize(
    ("fill", "operation"), [(by_columns, "fill_"), (normalized, "div"), (truncated, "trunc_normal_"), (copied, "copy_")]
)
def test_what_cannot_be_done_by_rows_is_made_whole_and_the_log_says_so(fill, operation, caplog):
    torch.manual_seed(5)
    expected = Table(fill)
    model = built(Table, fill=fill)
    taker = Taker()
    with caplog.at_level(logging.WARNING, "tulle"):
        materialize(model, keep={"weight": taker})
    [message] = caplog.messages
    assert message.startswith("'weight' is made whole for a moment: ")
    assert operation in message
    assert torch.equal(torch.cat(taker.chunks), expected.weight)
    give(model.weight, torch.cat(taker.chunks))
    assert_same(model, expected)


@pytest.mark.parametrize("kind", ["normal_", "uniform_"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("rows", [1, 2, 15, 16, 17, 31, 32, 33, 47, 64, 100, 1000, 4111])
@pytest.mark.parametrize("width", [1, 3, 16])
def test_chunks_are_drawn_as_the_whole(kind, dtype, rows, width):
    assert can_draw_in_chunks(kind, dtype, rows * width)
    arguments = (0.5, 2.0)
    one, other = torch.Generator().manual_seed(3), torch.Generator().manual_seed(3)
    whole = getattr(torch.empty(rows, width, dtype=dtype), kind)(*arguments, generator=one)
    for chunk_bytes in (1, 16 * width * dtype.itemsize, 48 * width * dtype.itemsize, 2**20):
        other.manual_seed(3)
        chunks = list(draw_in_chunks(kind, (rows, width), dtype, arguments, chunk_bytes=chunk_bytes, generator=other))
        assert torch.equal(torch.cat([chunk for _, chunk in chunks]), whole)
        assert torch.equal(one.get_state(), other.get_state())


def test_chunks_that_did_not_skip_what_is_drawn_in_vain_would_differ():
    one, other = torch.Generator().manual_seed(3), torch.Generator().manual_seed(3)
    whole = torch.empty(37).normal_(generator=one)
    parts = torch.cat([torch.empty(16).normal_(generator=other), torch.empty(21).normal_(generator=other)])
    assert torch.equal(whole[:16], parts[:16])
    cut = torch.cat([torch.empty(18).normal_(generator=other.manual_seed(3)), torch.empty(19).normal_(generator=other)])
    assert not torch.equal(whole, cut)


def test_a_dtype_that_is_drawn_in_another_way_is_found_out():
    assert not can_draw_in_chunks("bernoulli_", torch.float32, 100)
    assert not can_draw_in_chunks("normal_", torch.int64, 100)
    for dtype in (torch.bfloat16, torch.float16):
        whole = torch.empty(103, dtype=dtype).normal_(generator=torch.Generator().manual_seed(1))
        generator = torch.Generator().manual_seed(1)
        chunks = draw_in_chunks("normal_", (103,), dtype, chunk_bytes=1, generator=generator)
        is_same = torch.equal(torch.cat([chunk for _, chunk in chunks]), whole)
        assert is_same == can_draw_in_chunks("normal_", dtype, 103)


# Some of the parameters


def names_of(model: nn.Module) -> list[str]:
    return [*dict(model.named_parameters()), *dict(model.named_buffers())]


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


class Largest(TorchDispatchMode):
    """The bytes of the largest tensor that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.size_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        made = [one.untyped_storage().nbytes() for one in tree_leaves(result) if isinstance(one, Tensor)]
        self.size_bytes = max([self.size_bytes, *made])
        return result


@pytest.mark.parametrize(("name", "is_whole"), [("after.weight", False), ("weight", True)])
def test_what_is_not_made_is_never_whole(name, is_whole, monkeypatch):
    monkeypatch.setattr(replay, "CHUNK_BYTES", 10_000)
    model = built(Table, fill=embedding, rows=10_000)
    with Largest() as largest:
        materialize(model, only=[name])
    assert (largest.size_bytes >= 10_000 * 3 * 4) == is_whole


def test_a_tied_parameter_is_made_by_any_of_its_names():
    model = built(Everything)
    materialize(model, only=["out.weight"])
    assert not model.words.weight.is_meta
    with pytest.raises(ModelError, match=r"no parameter or buffer 'out\.wieght': name those of named_parameters\(\)"):
        materialize(built(Everything), only=["out.wieght"])


def test_some_are_made_and_others_kept_by_rows():
    torch.manual_seed(5)
    expected = Table(embedding)
    model = built(Table, fill=embedding)
    taker = Taker()
    materialize(model, only=["after.weight"], keep={"weight": taker})
    assert torch.equal(torch.cat(taker.chunks), expected.weight)
    assert torch.equal(model.after.weight, expected.after.weight)
    assert model.before.weight.is_meta


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


def test_only_what_is_to_be_made_of_a_model_on_meta_must_have_a_reset():
    torch.manual_seed(5)
    expected = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), Bare())
    torch.manual_seed(5)
    materialize(model, only=["1.weight"])
    assert torch.equal(model[1].weight, expected[1].weight)
    assert model[2].scale.is_meta


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


# Models on device meta that nobody recorded


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 4, padding_idx=0)
        self.attention = nn.MultiheadAttention(4, 2)
        self.norm = nn.BatchNorm1d(4)
        self.hidden = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
        self.recurrent = nn.GRU(4, 3)


def test_modules_on_meta_are_reset_in_turn():
    torch.manual_seed(5)
    expected = Layers()
    with torch.device("meta"):
        model = Layers()
    torch.manual_seed(5)
    materialize(model)
    assert_same(model, expected)


def test_a_table_on_meta_is_kept_by_rows():
    torch.manual_seed(5)
    expected = Layers()
    with torch.device("meta"):
        model = Layers()
    torch.manual_seed(5)
    taker = Taker()
    materialize(model, keep={"words.weight": taker})
    assert torch.equal(torch.cat(taker.chunks), expected.words.weight)
    assert torch.equal(model.recurrent.weight_hh_l0, expected.recurrent.weight_hh_l0)


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))


def test_a_module_that_nothing_fills_is_named():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(1, 1), Bare())
    text = r"'1.scale' is on device meta, and Bare has no reset_parameters that fills it: build the model within"
    with pytest.raises(ModelError, match=text):
        materialize(model)
    assert model[0].weight.is_meta


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


def test_a_model_that_reads_values_while_it_is_built_is_told():
    with pytest.raises(ModelError, match="the model reads a number of a tensor while it is built"):
        built(Reading)


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
