"""Where ids lie among the distinct rows that were told, by memory or by their numbers."""

import pytest
import torch

from tulle.tables import rows
from tulle.tables.distinct import Distinct, Ids
from tulle.tables.split import RowSplit


class Alone:
    rank, size = 0, 1


def told(*ids: torch.Tensor) -> Distinct:
    return Distinct.of(
        [*map(Ids.of, ids)], [RowSplit(f"t{n}", num_rows=50, width=2, axis=Alone()) for n in range(len(ids))]
    )


def found(distinct, table, ids, *, is_checked=False):
    """The rows that lie at the places of some ids."""
    return (distinct.of_table(table)[distinct.places(table, ids, is_checked=is_checked)] - 50 * table).tolist()


@pytest.mark.parametrize("is_checked", [False, True])
def test_what_was_told_and_what_is_equal_to_it_are_found(is_checked):
    batch = torch.tensor([[7, 3, 7], [49, 0, 3]])
    columns = [batch[:, 1:], batch[:, 0], batch.int()]
    distinct = told(*columns)
    for table, ids in enumerate(columns):
        for same in (ids, ids.clone(), ids.flip(0)):
            assert found(distinct, table, same, is_checked=is_checked) == same.tolist()


def test_other_ids_in_the_same_memory_are_not_taken_for_those_that_were_told():
    batch = torch.tensor([5, 3, 9, 3])
    distinct = told(batch)
    assert found(distinct, 0, batch.view(2, 2)) == [[5, 3], [9, 3]]
    assert found(distinct, 0, batch[::2]) == [5, 9]
    batch[0] = 9
    assert found(distinct, 0, batch) == [9, 3, 9, 3]
    batch[0] = 4
    with pytest.raises(KeyError, match="not all"):
        distinct.places(0, batch, is_checked=False)


def test_ids_whose_writes_nobody_counts_are_looked_for():
    with torch.inference_mode():
        batch = torch.tensor([5, 3])
    distinct = told(batch)
    with torch.inference_mode():
        batch[0] = 3
    assert found(distinct, 0, batch) == [3, 3]


@pytest.mark.parametrize("is_checked", [False, True])
def test_ids_of_32_bits_are_found_in_tables_that_have_more_rows_together(is_checked):
    sizes = [2**31 - 1, 100]
    ids = [torch.tensor(some, dtype=torch.int32) for some in ([5, 2**31 - 2], [99, 3, 99])]
    splits = [RowSplit(f"t{n}", num_rows=count, width=2, axis=Alone()) for n, count in enumerate(sizes)]
    distinct = Distinct.of([*map(Ids.of, ids)], splits)
    assert distinct.places(1, ids[1].clone(), is_checked=is_checked).tolist() == [1, 0, 1]


@pytest.mark.parametrize("num_rows", [2**20, 2**34])
def test_owners_are_told_where_a_row_lies_however_many_they_have(num_rows):
    split = RowSplit("t", num_rows=num_rows, width=2, axis=Alone())
    ids = torch.arange(1000) * (num_rows // 1000)
    [told_here] = rows.request_of([Ids.of(ids)], [split]).told
    assert told_here.dtype == (torch.int64 if num_rows > 2**31 else torch.int32)
    assert sorted(split.partition.rows(0, told_here).tolist()) == ids.tolist()


def test_nothing_is_found_in_nothing():
    nothing = torch.empty(0, 3, dtype=torch.long)
    distinct = told(nothing, torch.tensor([1]))
    for ids in (nothing, nothing.clone()):
        assert distinct.places(0, ids, is_checked=False).shape == (0, 3)
