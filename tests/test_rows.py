"""`RowSparse` is held against dense arithmetic: whatever rows it stores, the matrix that it stands for is the same."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import tulle
from tulle.errors import GradientError
from tulle.rows import Merge

NUM_ROWS = 7
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
INTEGERS = [torch.int32, torch.int64]


def make(indices: list[int], width: int = 3, dtype=torch.float64, index_dtype=torch.int64, *, strided: bool = False):
    """Rows whose values are small whole numbers, so that every dtype sums them exactly."""
    values = torch.arange(len(indices) * width, dtype=torch.float64).remainder(11).sub(5).to(dtype)
    values = values.view(width, len(indices)).t() if strided else values.view(len(indices), width)
    return tulle.RowSparse(torch.tensor(indices, dtype=index_dtype), values, NUM_ROWS)


def dense_reference(rows: tulle.RowSparse) -> torch.Tensor:
    dense = torch.zeros(rows.shape, dtype=torch.float64)
    return dense.index_add_(0, rows.indices.long(), rows.values.double()).to(rows.values.dtype)


@given(
    indices=st.lists(st.integers(0, NUM_ROWS - 1), max_size=25),
    width=st.integers(1, 5),
    dtype=st.sampled_from(FLOATS),
    index_dtype=st.sampled_from(INTEGERS),
    strided=st.booleans(),
)
def test_coalesced_rows_are_sorted_and_distinct_and_stand_for_the_same_matrix(
    indices, width, dtype, index_dtype, strided
):
    rows = make(indices, width, dtype, index_dtype, strided=strided)
    coalesced = rows.coalesce()
    assert coalesced.indices.tolist() == sorted(set(indices))
    assert (coalesced.indices.dtype, coalesced.values.dtype) == (index_dtype, dtype)
    assert coalesced.values.shape == (len(set(indices)), width)
    reference = dense_reference(rows)
    torch.testing.assert_close(coalesced.values, reference[coalesced.indices.long()], rtol=0, atol=0)
    torch.testing.assert_close(rows.to_dense(), reference, rtol=0, atol=0)
    torch.testing.assert_close(rows.to_sparse_coo().to_dense(), reference, rtol=0, atol=0)
    assert rows.density == coalesced.density == len(set(indices)) / NUM_ROWS


@given(
    indices=st.lists(st.integers(0, NUM_ROWS - 1), min_size=1, max_size=60),
    length=st.integers(1, 9),
    strided=st.booleans(),
)
def test_runs_that_are_summed_in_pieces_as_on_a_gpu_have_the_same_sums(indices, length, strided):
    rows = make(indices, 3, strided=strided)
    merge = Merge.of(rows.indices)
    expected = merge.sum(rows.values.double())
    torch.testing.assert_close(merge._sum_of_pieces(rows.values.double(), length), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "indices",
    [[], [3], list(range(NUM_ROWS)), [5, 5, 5], list(reversed(range(NUM_ROWS)))],
    ids=["empty", "one", "all", "same", "reversed"],
)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_borders_of_coalescing_hold_for_every_dtype(indices, dtype):
    rows = make(indices, dtype=dtype)
    coalesced = rows.coalesce()
    assert coalesced.is_coalesced
    assert coalesced.indices.tolist() == sorted(set(indices))
    torch.testing.assert_close(coalesced.to_dense(), dense_reference(rows), rtol=0, atol=0)


def test_coalescing_twice_does_nothing():
    coalesced = make([4, 1, 4]).coalesce()
    assert coalesced.coalesce() is coalesced


def test_coalescing_leaves_its_argument_as_it_was():
    rows = make([4, 1, 4])
    before = rows.indices.clone(), rows.values.clone()
    rows.coalesce()
    assert not rows.is_coalesced
    assert torch.equal(rows.indices, before[0])
    assert torch.equal(rows.values, before[1])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_summed_in_float32(dtype):
    # 4096 ones: a running sum in half precision stands still at 2048 (float16) or 256 (bfloat16).
    rows = tulle.RowSparse(torch.zeros(4096, dtype=torch.int64), torch.ones(4096, 1, dtype=dtype), num_rows=1)
    assert rows.coalesce().values.item() == 4096


def test_rows_that_sum_to_zero_stay_stored():
    values = torch.tensor([[1.0, 2.0], [-1.0, -2.0]])
    rows = tulle.RowSparse(torch.tensor([3, 3]), values, NUM_ROWS).coalesce()
    assert rows.indices.tolist() == [3]
    assert rows.values.tolist() == [[0.0, 0.0]]


def test_an_embeddings_gradient_is_taken_with_its_duplicates():
    table = nn.Embedding(NUM_ROWS, 2, sparse=True).double()
    table(torch.tensor([4, 1, 4])).sum().backward()
    rows = tulle.RowSparse.from_tensor(table.weight.grad)
    assert not rows.is_coalesced
    assert rows.indices.tolist() == [4, 1, 4]
    assert rows.coalesce().values.tolist() == [[1.0, 1.0], [2.0, 2.0]]


def test_a_coalesced_tensor_stays_coalesced_there_and_back():
    tensor = make([4, 1, 4]).to_sparse_coo().coalesce()
    rows = tulle.RowSparse.from_tensor(tensor)
    assert rows.is_coalesced
    assert rows.to_sparse_coo().is_coalesced()
    assert not make([4, 1, 4]).to_sparse_coo().is_coalesced()


def test_one_row_of_odd_strides_keeps_its_values():
    # torch calls one row of strides (1, 1) contiguous, and then loses all but its first value in to_dense.
    values = torch.tensor([[5.0], [4.0]]).t()
    assert tulle.RowSparse(torch.tensor([0]), values, 1).to_sparse_coo().to_dense().tolist() == [[5.0, 4.0]]


def test_no_rows_have_memory_of_their_own():
    # Tables that travel as one are slices of one sum, and torch lets the memory of no rows grow where it adds to them.
    whole, numbers = torch.arange(8.0).view(4, 2), torch.arange(4)
    none = tulle.RowSparse.trusted(numbers[:0], whole[:0], 5, is_coalesced=True).to_sparse_coo()
    none += tulle.RowSparse(torch.tensor([4, 1]), torch.ones(2, 2), 5).to_sparse_coo()
    assert whole.flatten().tolist() == [*range(8)]
    assert numbers.tolist() == [*range(4)]


def test_a_stored_row_of_zeros_stays_where_a_dense_one_goes():
    dense = torch.tensor([[0.0, 0.0], [0.0, 3.0], [0.0, 0.0]])
    assert tulle.RowSparse.from_tensor(dense).indices.tolist() == [1]
    stored = torch.sparse_coo_tensor(torch.tensor([[0, 1]]), dense[:2], (3, 2))
    assert tulle.RowSparse.from_tensor(stored).indices.tolist() == [0, 1]


def test_a_tensor_of_two_sparse_dimensions_gives_whole_rows():
    elements = torch.sparse_coo_tensor(torch.tensor([[3, 1, 3, 3], [0, 1, 1, 0]]), torch.tensor([1.0, 0, 2, 4]), (5, 2))
    rows = tulle.RowSparse.from_tensor(elements)
    assert rows.is_coalesced
    assert rows.indices.tolist() == [1, 3], "what is stored stays, zeros too"
    assert rows.values.tolist() == [[0, 0], [5, 2]]
    assert len(tulle.RowSparse.from_tensor(torch.zeros(3, 2).to_sparse()).indices) == 0


def test_a_row_of_nan_is_a_row():
    dense = torch.tensor([[0.0], [float("nan")]])
    assert tulle.RowSparse.from_tensor(dense).indices.tolist() == [1]


@given(st.lists(st.lists(st.sampled_from([0.0, 1.0, -2.0]), min_size=2, max_size=2), min_size=1, max_size=8))
def test_a_dense_matrix_comes_back_as_it_was(matrix):
    dense = torch.tensor(matrix, dtype=torch.float64)
    rows = tulle.RowSparse.from_tensor(dense)
    assert rows.is_coalesced
    assert torch.equal(rows.to_dense(), dense)
    assert rows.density == (dense != 0).any(1).double().mean().item()


def test_a_table_of_no_rows_has_density_zero():
    rows = tulle.RowSparse(torch.empty(0, dtype=torch.int32), torch.empty(0, 4), num_rows=0)
    assert rows.density == 0.0
    assert rows.to_dense().shape == (0, 4)


def test_scaling_keeps_rows_and_order():
    rows = make([4, 1, 4])
    assert torch.equal(rows.scaled(0.5).values, rows.values * 0.5)
    assert torch.equal(rows.scaled(0.5).indices, rows.indices)
    assert rows.coalesce().scaled(2.0).is_coalesced
    assert not rows.scaled(2.0).is_coalesced


def test_it_says_what_it_is():
    assert repr(make([4, 1, 4])) == "RowSparse(3 of 7 rows, width 3, float64, cpu)"


INDICES = torch.tensor([0, 1])
VALUES = torch.ones(2, 3)


@pytest.mark.parametrize(
    ("indices", "values", "text"),
    [
        (INDICES.view(1, 2), VALUES, r"indices of shape \(1, 2\) and dtype torch.int64, expected \[rows\] of int32"),
        (INDICES.float(), VALUES, r"indices of shape \(2,\) and dtype torch.float32, expected \[rows\]"),
        (INDICES, VALUES[0], r"values of shape \(3,\) and dtype torch.float32, expected \[rows, width\]"),
        (INDICES, VALUES.long(), r"values of shape \(2, 3\) and dtype torch.int64, expected .* floating-point dtype"),
        ([3, 1], VALUES, "indices as a list, expected a tensor"),
        (INDICES, VALUES[:1], "2 indices and 1 rows of values: give one index a row"),
        (INDICES, VALUES.to("meta"), "indices on cpu and values on meta: move them to one device"),
    ],
)
def test_parts_that_do_not_fit_are_refused(indices, values, text):
    with pytest.raises(GradientError, match=f"RowSparse was given {text}"):
        tulle.RowSparse(indices, values, NUM_ROWS)


@pytest.mark.parametrize("num_rows", [-5, 7.0, "7", None])
def test_a_number_of_rows_that_is_none_is_refused(num_rows):
    with pytest.raises(GradientError, match=f"RowSparse was given num_rows={num_rows!r}, expected the number of"):
        tulle.RowSparse(INDICES, VALUES, num_rows)


@pytest.mark.parametrize("index_dtype", INTEGERS)
@pytest.mark.parametrize("wrong", [-1, NUM_ROWS, 2**31 - 1])
def test_a_row_out_of_range_is_named(wrong, index_dtype):
    indices = torch.tensor([0, wrong, 3], dtype=index_dtype)
    with pytest.raises(GradientError, match=rf"was given row {wrong}, expected rows in 0..6 \(num_rows is 7\)"):
        tulle.RowSparse(indices, torch.ones(3, 1), NUM_ROWS)


def test_the_first_and_the_last_row_are_in_range():
    assert len(tulle.RowSparse(torch.tensor([0, NUM_ROWS - 1]), VALUES, NUM_ROWS).indices) == 2


@pytest.mark.parametrize(
    ("tensor", "text"),
    [
        (torch.ones(3), r"a tensor of shape \(3,\), expected \[num_rows, width\]: reshape it"),
        ([[1.0]], "was given a list, expected a tensor"),
        (torch.eye(3).to_mkldnn(), r"a torch._mkldnn tensor, expected .*: convert it with tensor.to_dense\(\)"),
    ],
)
def test_tensors_of_another_kind_are_refused(tensor, text):
    with pytest.raises(GradientError, match=text):
        tulle.RowSparse.from_tensor(tensor)
