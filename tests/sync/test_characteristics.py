"""Density, overlap, densification and skewness are Zen's formulas, counted here by hand over sets of rows."""

import sys
from itertools import combinations

import pytest
import torch
from torch import Tensor

import tulle
from ranks import on_ranks
from tulle import RowSparse
from tulle.comm import gather_values, traffic
from tulle.cost import Characteristics
from tulle.errors import GradientError
from tulle.mesh import Axis

V, WIDTH = 1000, 4
OUT_OF_RANGE = torch.sparse_coo_tensor(torch.tensor([[2, V]]), torch.ones(2, WIDTH), (V, WIDTH), check_invariants=False)


def rows_of(kind: str, rank: int, num_rows: int = V) -> list[int]:
    """Row numbers as looked up, with repetitions."""
    generator = torch.Generator().manual_seed(17 * rank + 1)
    match kind:
        case "zipf":
            weights = 1.0 / torch.arange(1, num_rows + 1)
            return torch.multinomial(weights, num_rows // 5, replacement=True, generator=generator).tolist()
        case "even":
            return torch.randint(num_rows, (num_rows // 4,), generator=generator).tolist()
        case "the same":
            return [3, 3, 5, num_rows - 1]
        case "apart":
            return [rank, rank + 100, rank + 200]
        case "empty on rank 0":
            return [] if rank == 0 else [1, 2, 2, num_rows - rank]
        case _:
            return []


KINDS = ("zipf", "even", "the same", "apart", "empty on rank 0", "empty")


def by_hand(held: list[set[int]], num_rows: int) -> tuple[float, float, float, float]:
    """Density, overlap, densification and skewness of the rows that the ranks hold."""
    ranks = len(held)
    mean = sum(len(rows) for rows in held) / ranks
    overlaps = [len(a & b) / min(len(a), len(b)) for a, b in combinations(held, 2) if a and b]
    part = -(-num_rows // ranks)
    skews = [
        max(sum(row // part == i for row in rows) for i in range(ranks)) * ranks / len(rows) for rows in held if rows
    ]
    return (
        mean / num_rows,
        sum(overlaps) / len(overlaps) if overlaps else 0.0,
        len(set().union(*held)) / mean if mean else 1.0,
        sum(skews) / len(skews) if skews else 1.0,
    )


def gradient(kind: str, rank: int, form: str) -> RowSparse | Tensor:
    indices = torch.tensor(rows_of(kind, rank), dtype=torch.int64)
    rows = RowSparse(indices, torch.ones(len(indices), WIDTH), V)
    match form:
        case "rows":
            return rows
        case "coo":
            return rows.to_sparse_coo()
        case _:
            return rows.to_dense()


def measures(looks: Characteristics) -> tuple[float, float, float, float]:
    return looks.density, looks.overlap_ratio, looks.densification_ratio, looks.skewness_ratio


def check(looks: Characteristics, kind: str, axis: Axis) -> None:
    held = [set(rows_of(kind, rank)) for rank in range(axis.size)]
    assert measures(looks) == pytest.approx(by_hand(held, V), rel=1e-9), kind
    assert looks.rows_per_rank == tuple(len(rows) for rows in held)
    assert (looks.num_rows, looks.width, looks.value_bytes) == (V, WIDTH, 4)
    assert looks.union_rows == len(set().union(*held))
    mean = sum(looks.rows_per_rank) / axis.size or 1.0
    grown = [len(set().union(*held[: n + 1])) / mean for n in range(axis.size)]
    if looks.union_rows:
        assert looks.densification_curve == pytest.approx(grown)
    assert gather_values(measures(looks), axis, label="here") == [measures(looks)] * axis.size


@on_ranks(1, 2, 3, 4)
def test_the_ratios_are_those_that_sets_give_in_every_form_of_a_gradient():
    axis = tulle.init(data=-1)["data"]
    for form in ("rows", "coo", "dense"):
        for kind in KINDS:
            check(tulle.sync.characteristics(gradient(kind, axis.rank, form), axis), kind, axis)


@on_ranks(3)
def test_several_tables_come_back_as_they_were_given():
    axis = tulle.init(data=-1)["data"]
    forms = ["rows", "coo", "dense"]
    grads = [gradient(kind, axis.rank, forms[k % 3]) for k, kind in enumerate(KINDS)]
    in_list = tulle.sync.characteristics(grads, axis)
    by_name = tulle.sync.characteristics(dict(zip(KINDS, grads, strict=True)), axis)
    assert isinstance(in_list, list)
    assert list(by_name) == list(KINDS)
    for kind, looks in zip(KINDS, in_list, strict=True):
        check(looks, kind, axis)
        check(by_name[kind], kind, axis)
    assert tulle.sync.characteristics([], axis) == []
    assert tulle.sync.characteristics({}, axis) == {}


@on_ranks(2)
def test_known_cases_have_the_ratios_that_a_reader_expects():
    axis = tulle.init(data=-1)["data"]
    same = tulle.sync.characteristics(gradient("the same", axis.rank, "rows"), axis)
    assert (same.overlap_ratio, same.densification_ratio) == (1.0, 1.0)
    apart = tulle.sync.characteristics(gradient("apart", axis.rank, "rows"), axis)
    assert (apart.overlap_ratio, apart.densification_ratio, apart.skewness_ratio) == (0.0, 2.0, 2.0)
    whole = tulle.sync.characteristics(torch.ones(10, 2), axis)
    assert (whole.density, whole.skewness_ratio) == (1.0, 1.0)


@on_ranks(2)
def test_gradients_stay_as_they_are_and_values_do_not_travel():
    axis = tulle.init(data=-1)["data"]
    wide = torch.zeros(V, 4096).to_sparse(1)
    wide = torch.sparse_coo_tensor(
        torch.tensor([[7, 7, axis.rank]]), torch.ones(3, 4096), (V, 4096), check_invariants=False
    )
    before = traffic.total.bytes_sent
    tulle.sync.characteristics(wide, axis)
    assert traffic.total.bytes_sent - before < 1000
    assert not wide.is_coalesced()
    assert wide._values().tolist() == torch.ones(3, 4096).tolist()


@on_ranks(2, 3)
def test_what_is_no_gradient_of_a_table_is_refused_on_all_ranks_alike():
    axis = tulle.init(data=-1)["data"]
    good = gradient("zipf", axis.rank, "rows")
    last = axis.rank == axis.size - 1
    for bad, text in [
        ([1.0, 2.0], r"was given a float, expected a RowSparse, a sparse COO tensor or a dense tensor"),
        ([torch.ones(3)], r"was given a tensor of shape \(3,\), expected \[num_rows, width\]"),
        ([OUT_OF_RANGE], r"sparse tensor with an index out of range: .* for dim 0, size is 1000 but found index 1000"),
        ([torch.ones(V, WIDTH, device="meta")], r"on device meta, but axis 'data' reduces on cpu: move it there"),
        (iter([torch.ones(3)]), r"was given a tensor of shape \(3,\), expected \[num_rows, width\]"),
    ]:
        with pytest.raises(GradientError, match=text):
            tulle.sync.characteristics(bad if last else [good] * 2, axis)
    with pytest.raises(GradientError, match="was given a int, expected a RowSparse"):
        tulle.sync.characteristics(3 if last else good, axis)
    tables_differ = rf"on rank {1 if axis.size == 2 else 2} of axis 'data' and of .* on rank 0: give the same tables"
    for other in ([good, good], [torch.ones(V, WIDTH + 1)], [torch.ones(V, WIDTH).half()], []):
        with pytest.raises(GradientError, match=tables_differ):
            tulle.sync.characteristics(other if last else [good], axis)
    check(tulle.sync.characteristics(good, axis), "zipf", axis)  # and all go on


@on_ranks(3)
def test_a_sample_of_a_large_gradient_has_the_ratios_of_the_whole():
    axis = tulle.init(data=-1)["data"]
    module = sys.modules["tulle.sync.characteristics"]  # the package has the function by this name
    num_rows = 60_000
    for kind in ("zipf", "even"):
        held = [set(rows_of(kind, rank, num_rows)) for rank in range(axis.size)]
        indices = torch.tensor(sorted(held[axis.rank]))
        grad = RowSparse(indices, torch.ones(len(indices), 1), num_rows)
        before = traffic.total.bytes_sent
        whole = tulle.sync.characteristics(grad, axis)
        whole_bytes = traffic.total.bytes_sent - before
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "SAMPLED_ROWS", 1500)
            before = traffic.total.bytes_sent
            looks = tulle.sync.characteristics(grad, axis)
            assert traffic.total.bytes_sent - before < whole_bytes
        assert measures(whole) == pytest.approx(by_hand(held, num_rows), rel=1e-9)
        assert looks.spread.share < 0.5
        assert looks.rows_per_rank == whole.rows_per_rank
        assert measures(looks) == pytest.approx(measures(whole), rel=0.06)
