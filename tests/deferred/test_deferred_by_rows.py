"""A parameter that no rank may hold whole gets its values by rows: those of the whole, to the last bit."""

import logging

import pytest
import torch
from deferred_networks import Layers, Table, Taker, assert_same, built, embedding
from torch import Tensor, nn
from torch.nn import init
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tulle.deferred import give, materialize, replay
from tulle.deferred.draws import can_draw_in_chunks, draw_in_chunks


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


def drawn_in_another_shape(rows: int, width: int, dtype: torch.dtype) -> Tensor:
    made = torch.randn(rows * width, dtype=dtype).view(rows, width)
    init.uniform_(made.view(-1), 1.0, 3.0)
    return made


FILLS = [embedding, embedding_drawn_anew, scaled, with_rows_set, zeros, drawn_in_another_shape]


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


def test_some_are_made_and_others_kept_by_rows():
    torch.manual_seed(5)
    expected = Table(embedding)
    model = built(Table, fill=embedding)
    taker = Taker()
    materialize(model, only=["after.weight"], keep={"weight": taker})
    assert torch.equal(torch.cat(taker.chunks), expected.weight)
    assert torch.equal(model.after.weight, expected.after.weight)
    assert model.before.weight.is_meta


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
