"""The promise that schemes differ in bytes and time only: each gives the sum that a dense all-reduce would give."""

import sys
from dataclasses import dataclass
from typing import Literal

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import tulle
from gigabit import give_network
from pretended_hosts import pretend_hosts
from ranks import on_ranks, run_on_ranks
from tulle import RowSparse
from tulle.comm import traffic
from tulle.errors import PlanError
from tulle.sync import SCHEMES, Table, announce, sum_gradients

Kind = Literal["rows", "coo", "empty", "one row", "all rows", "zero sum", "strided values"]
KINDS: list[Kind] = ["rows", "coo", "empty", "one row", "all rows", "zero sum", "strided values"]
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
# Relative to the largest value: halves are summed in another order and width by each scheme.
TOLERANCES = {torch.float64: 1e-14, torch.float32: 1e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@dataclass(frozen=True)
class Case:
    """What each rank holds of one table; everything else follows from the seed."""

    kinds: tuple[Kind, ...]
    num_rows: int
    width: int
    dtype: torch.dtype
    index_dtype: torch.dtype
    seed: int


cases = st.builds(
    Case,
    kinds=st.lists(st.sampled_from(KINDS), min_size=3, max_size=3).map(tuple),
    num_rows=st.integers(1, 40),
    width=st.sampled_from([1, 3, 8]),
    dtype=st.sampled_from(DTYPES),
    index_dtype=st.sampled_from([torch.int32, torch.int64]),
    seed=st.integers(0, 2**31),
)


def gradient(case: Case, rank: int) -> RowSparse | Tensor:
    """What one rank holds."""
    generator = torch.Generator().manual_seed(case.seed + rank)
    kind = case.kinds[rank]
    count = {"empty": 0, "one row": 1}.get(kind, int(torch.randint(1, 30, (), generator=generator)))
    indices = torch.randint(case.num_rows, (count,), generator=generator).to(case.index_dtype)
    if kind == "all rows":
        indices = torch.randperm(case.num_rows, generator=generator).to(case.index_dtype)
    values = torch.randn(len(indices), 2 * case.width, generator=generator, dtype=torch.float64).to(case.dtype)
    values = values[:, ::2] if kind == "strided values" else values[:, : case.width].contiguous()
    if kind == "zero sum" and len(indices):
        indices, values = indices.repeat(2), torch.cat([values, -values])
    if kind == "coo":
        shape = (case.num_rows, case.width)
        return torch.sparse_coo_tensor(indices.long()[None], values, shape, check_invariants=True)
    return RowSparse(indices, values, case.num_rows)


def as_rows(gradient: RowSparse | Tensor) -> RowSparse:
    return gradient if isinstance(gradient, RowSparse) else RowSparse.from_tensor(gradient)


def reduce_each_way(case: Case, op: Literal["mean", "sum"]) -> None:
    """On every rank: all schemes against the dense sum of what all ranks hold."""
    axis = give_network(tulle.init(data=-1)["data"])
    mine = gradient(case, axis.rank)
    held = [as_rows(gradient(case, rank)) for rank in range(axis.size)]
    expected = sum(rows.to_dense().double() for rows in held)
    assert isinstance(expected, Tensor)
    touched = torch.cat([rows.indices.long() for rows in held]).unique()
    for scheme in [*SCHEMES, "auto"]:
        result = as_rows(total := tulle.sync.all_reduce(mine, axis, scheme=scheme, op=op))
        assert type(total) is type(mine)
        assert result.values.dtype == case.dtype
        assert result.indices.tolist() == touched.tolist(), "rows that sum to zero stay, and no others come"
        factor = axis.size if op == "mean" else 1
        error = (result.to_dense().double() * factor - expected).abs().max().item()
        assert error <= TOLERANCES[case.dtype] * max(1.0, expected.abs().max().item()), scheme
        assert_bitwise_alike(result)


def assert_bitwise_alike(rows: RowSparse) -> None:
    """Replicas that differ in the last bit drift apart."""
    mine = rows.to_dense().double()
    highest = torch.stack([mine, -mine])
    dist.all_reduce(highest, dist.ReduceOp.MAX)
    assert torch.equal(highest[0], -highest[1]), "the highest of all ranks is the lowest"


@settings(max_examples=20)
@given(case=cases, op=st.sampled_from(["mean", "sum"]))
def test_every_scheme_gives_the_sum_of_what_the_ranks_hold(case, op):
    run_on_ranks(3, reduce_each_way, case=case, op=op)


@on_ranks(1, 2, 4)
@pytest.mark.parametrize("dtype", DTYPES)
def test_schemes_agree_on_any_number_of_ranks(dtype):
    kinds: tuple[Kind, ...] = ("zero sum", "rows", "empty", "coo")
    reduce_each_way(Case(kinds, num_rows=17, width=3, dtype=dtype, index_dtype=torch.int64, seed=5), "mean")
    axis = tulle.init(data=-1)["data"]
    for scheme in [*SCHEMES, "auto"]:
        for rows, num_rows, width in ((2, 5, 0), (0, 5, 3), (0, 0, 3), (0, 0, 0)):
            indices = torch.arange(rows) + axis.rank
            mine = RowSparse(indices, torch.ones(rows, width, dtype=dtype), num_rows)
            total = tulle.sync.all_reduce(mine, axis, scheme=scheme)
            assert total.values.shape == (len(total.indices), width), "nothing to send is no reason to fail"
            assert total.indices.tolist() == ([*range(axis.size + 1)] if rows else [])
        hollow = torch.sparse_coo_tensor(torch.tensor([[axis.rank]]), torch.ones(1, 0, 3), (4, 0, 3))
        assert tulle.sync.all_reduce(hollow, axis, scheme=scheme).shape == (4, 0, 3)


@on_ranks(2, 3, 4)
@pytest.mark.parametrize("wire_dtype", [torch.bfloat16, torch.float16])
def test_what_a_narrow_wire_rounds_it_rounds_alike_on_all_ranks(wire_dtype):
    axis = tulle.init(data=-1)["data"]
    table = Table("words", 40, 3, torch.float32, torch.device("cpu"), wire_dtype=wire_dtype)
    kinds: tuple[Kind, ...] = ("rows", "all rows", "empty", "rows")
    case = Case(kinds, num_rows=40, width=3, dtype=torch.float32, index_dtype=torch.int64, seed=3)
    held = [as_rows(gradient(case, rank)).coalesce() for rank in range(axis.size)]
    expected = torch.stack([rows.to_dense() for rows in held]).sum(0)
    counts = announce([held[axis.rank]], axis).wait()
    for scheme in SCHEMES:
        [total] = sum_gradients([held[axis.rank]], [table], counts, [scheme], axis).wait()
        assert isinstance(total, RowSparse)
        assert total.values.dtype == torch.float32
        error = (total.to_dense() - expected).abs().max().item()
        assert 0.0 < error <= TOLERANCES[wire_dtype] * expected.abs().max().item(), scheme
        assert_bitwise_alike(total)


@on_ranks(2)
@pytest.mark.parametrize("scheme", [*SCHEMES])
def test_the_agreement_can_fail_where_a_rank_keeps_its_rows_to_itself(scheme):
    axis = tulle.init(data=-1)["data"]
    table = Table("words", 5, 2, torch.float64, torch.device("cpu"))
    rows = RowSparse(torch.tensor([axis.rank]), torch.ones(1, 2, dtype=torch.float64), 5).coalesce()
    counts = announce([rows], axis).wait()
    [whole] = sum_gradients([rows], [table], counts, [scheme], axis).wait()
    assert isinstance(whole, RowSparse)
    assert whole.indices.tolist() == [0, 1]
    hidden = rows if axis.rank == 0 else table.empty()
    [part] = sum_gradients([hidden], [table], announce([hidden], axis).wait(), [scheme], axis).wait()
    assert isinstance(part, RowSparse)
    assert part.indices.tolist() == [0]


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("scheme", [*SCHEMES])
def test_a_step_sums_rows_dense_and_absent_gradients_of_several_tables_together(scheme):
    axis = tulle.init(data=-1)["data"]
    device = torch.device("cpu")
    tables = [
        Table("rows", 9, 2, torch.float64, device),
        Table("dense on rank 0", 4, 3, torch.float64, device),
        Table("absent", 7, 2, torch.float64, device),
        Table("narrow, in half", 30, 1, torch.float16, device),
        Table("rows of rank 0 only", 5, 5, torch.float32, device),
    ]
    first = axis.rank == 0
    rows = RowSparse(torch.tensor([axis.rank, 8]), torch.ones(2, 2, dtype=torch.float64), 9).coalesce()
    dense = torch.ones(4, 3, dtype=torch.float64)
    half = RowSparse(torch.tensor([axis.rank, 9, 3 + axis.rank]), torch.ones(3, 1).half(), 30).coalesce()
    gradients = [
        rows,
        dense if first else RowSparse.from_tensor(dense),
        None,
        half,
        RowSparse(torch.tensor([2]), torch.full((1, 5), 3.0), 5).coalesce() if first else None,
    ]
    counts = announce(gradients, axis).wait()
    sums = sum_gradients(gradients, tables, counts, [scheme] * len(tables), axis).wait()
    assert isinstance(sums[0], RowSparse)
    assert sums[0].to_dense()[8].tolist() == [axis.size] * 2
    assert isinstance(sums[1], Tensor)
    assert torch.equal(sums[1], axis.size * dense)
    assert sums[2] is None
    assert isinstance(sums[3], RowSparse)
    assert sums[3].to_dense()[9].item() == axis.size
    assert isinstance(sums[4], RowSparse)
    assert sums[4].indices.tolist() == [2]
    assert sums[4].values.tolist() == [[3.0] * 5]


@on_ranks(2, 3)
@pytest.mark.parametrize("op", ["mean", "sum"])
def test_a_dense_tensor_of_any_rank_makes_the_sum_dense_and_travels_in_the_dtype_that_was_asked_for(op):
    axis = tulle.init(data=-1)["data"]
    rows = RowSparse(torch.tensor([axis.rank, 3, 3]), torch.full((3, 2), 1 / 3), 5)
    expected = sum(RowSparse(torch.tensor([rank, 3, 3]), rows.values, 5).to_dense() for rank in range(axis.size))
    expected = expected / axis.size if op == "mean" else expected
    for mine in (rows, rows.to_sparse_coo()) if axis.rank else (rows.to_dense(), rows.to_dense()):
        sent: list[int] = []
        for wire_dtype, tolerance in ((None, 1e-6), ("bf16", 1e-2)):
            before = traffic.total.bytes_sent
            total = tulle.sync.all_reduce(mine, axis, op=op, wire_dtype=wire_dtype)
            sent.append(traffic.total.bytes_sent - before)
            assert (type(total), total.layout, total.dtype) == (Tensor, torch.strided, torch.float32)
            torch.testing.assert_close(total, expected, rtol=tolerance, atol=0)
        assert sent[0] - sent[1] == round(2 * (axis.size - 1) / axis.size * 40) - round(
            (axis.size - 1) / axis.size * 40
        )


@on_ranks(2, 3)
def test_a_batch_of_padding_alone_sends_no_row_and_gets_the_others():
    mesh = tulle.init(data=-1)
    table = nn.Embedding(8, 2, padding_idx=0, sparse=True)
    ids = torch.tensor([[0, 0]]) if mesh.rank == 0 else torch.tensor([[mesh.rank, 0]])
    table(ids).sum().backward()
    total = tulle.sync.all_reduce(table.weight.grad, mesh["data"], scheme="allgather", op="sum")
    assert total.coalesce().indices()[0].tolist() == list(range(1, mesh.size))


@on_ranks(2)
def test_ranks_that_ask_for_different_things_are_told():
    axis = tulle.init(data=-1)["data"]
    grad = RowSparse(torch.tensor([1]), torch.ones(1, 2), 3)
    text = r"called with scheme 'auto', op 'sum' on rank 1 .* and scheme 'auto', op 'mean' on rank 0"
    with pytest.raises(PlanError, match=text):
        tulle.sync.all_reduce(grad, axis, op="sum" if axis.rank else "mean")


@on_ranks(2)
def test_of_gradients_of_ever_other_shapes_the_last_choices_are_kept(monkeypatch):
    axis = give_network(tulle.init(data=-1)["data"])
    monkeypatch.setattr(sys.modules["tulle.sync.all_reduce"], "_MOST_KINDS", 2)
    for num_rows in (3, 4, 3, 5):
        tulle.sync.all_reduce(RowSparse(torch.tensor([1]), torch.ones(1, 2), num_rows), axis)
    assert [shape for shape, *_ in axis.kept[tulle.sync.all_reduce]] == [(3, 2), (5, 2)]


@on_ranks(1, 2)
@pytest.mark.parametrize("scheme", ["auto", *SCHEMES])
def test_what_requires_a_gradient_is_reduced_as_a_value(scheme):
    axis = give_network(tulle.init(data=-1)["data"])
    values = torch.ones(2, 2, requires_grad=True)
    rows = tulle.sync.all_reduce(RowSparse(torch.tensor([1, 1]), values, 3), axis, scheme=scheme)
    assert rows.values.tolist() == [[2.0, 2.0]]
    dense = tulle.sync.all_reduce(values, axis)
    assert not dense.requires_grad
    assert not rows.values.requires_grad


@on_ranks(4)
def test_schemes_sum_what_is_large_on_hosts_of_several_ranks():
    pretend_hosts(2)
    axis = tulle.init(data=-1)["data"]
    drawn = [torch.Generator().manual_seed(rank) for rank in range(axis.size)]
    indices = [torch.randperm(3_000, generator=generator)[:500] for generator in drawn]
    values = [torch.randn(500, 64, generator=generator, dtype=torch.float64) for generator in drawn]
    held = [RowSparse(*one, 3_000) for one in zip(indices, values, strict=True)]
    expected = sum(one.to_dense() for one in held)
    for scheme in SCHEMES:
        found = tulle.sync.all_reduce(held[axis.rank], axis, scheme=scheme, op="sum").to_dense()
        torch.testing.assert_close(found, expected, rtol=1e-14, atol=1e-14)
