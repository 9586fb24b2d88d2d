"""Rows of a split table come in natural order, in blocks of any size, to whoever wants them; and go back."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

import tulle
from ranks import on_ranks, run_on_ranks
from tulle.comm import traffic
from tulle.mesh import Axis
from tulle.partition import Hashed
from tulle.tables import ColumnSplit, RowSplit, natural
from tulle.tables.natural import RowOrder, block_rows_of, blocks_of_chunks, chunk_of, natural_order

ROWS, WIDTH = 101, 3


def whole_table(rows: int = ROWS, width: int = WIDTH, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.arange(1, rows * width + 1, dtype=dtype).view(rows, width)


def data_axis() -> Axis:
    return tulle.init(data=-1)["data"]


@on_ranks(1, 2, 3, 4)
@pytest.mark.parametrize("block_rows", [1, 7, 1000])
def test_chunks_are_collected_in_natural_order_and_delivered_back(block_rows):
    axis = data_axis()
    split = RowSplit("words", ROWS, WIDTH, axis)
    whole = whole_table()
    part = split.take(whole)
    order = RowOrder(split)
    returned = torch.zeros_like(part)
    got = []
    for ranges in blocks_of_chunks(split, block_rows):
        block = order.collect(part, ranges)
        assert torch.equal(block, whole[ranges[axis.rank].start : ranges[axis.rank].stop])
        order.deliver(block, returned, ranges)
        got += list(ranges[axis.rank])
    assert got == list(chunk_of(split, axis.rank))
    assert torch.equal(returned, part), "empty places too"


@on_ranks(1, 3)
@pytest.mark.parametrize("kind", [RowSplit, ColumnSplit])
def test_a_range_can_go_to_one_rank_or_to_all(kind):
    axis = data_axis()
    split = kind("words", ROWS, 5, axis)
    whole = whole_table(width=5)
    part = split.take(whole)
    order = natural_order(split)
    last = axis.size - 1
    to_last = [range(20, 60) if rank == last else range(0) for rank in range(axis.size)]
    assert torch.equal(order.collect(part, to_last), whole[20:60] if axis.rank == last else whole[:0])
    assert torch.equal(order.collect(part, [range(90, ROWS)] * axis.size), whole[90:])


def moved(rows: int, block_rows: int) -> None:
    axis = data_axis()
    split = RowSplit("words", rows, 2, axis)
    whole = whole_table(rows, 2, torch.float32)
    part, order = split.take(whole), RowOrder(split)
    blocks = [order.collect(part, ranges) for ranges in blocks_of_chunks(split, block_rows)]
    mine = chunk_of(split, axis.rank)
    assert torch.equal(torch.cat(blocks), whole[mine.start : mine.stop])


@settings(max_examples=15)
@given(ranks=st.integers(1, 4), rows=st.integers(1, 60), block_rows=st.integers(1, 70))
def test_tables_and_blocks_may_have_any_size(ranks, rows, block_rows):
    run_on_ranks(ranks, moved, rows=rows, block_rows=block_rows)


@on_ranks(4)
def test_no_message_is_larger_than_a_block():
    axis = data_axis()
    split = RowSplit("words", ROWS, WIDTH, axis)
    part, order = split.take(whole_table()), RowOrder(split)
    for ranges in blocks_of_chunks(split, 5):
        traffic.take_labels()
        order.collect(part, ranges)
        assert traffic.take_labels()["words"].bytes_sent <= 3 * 5 * WIDTH * part.element_size()


@on_ranks(3)
def test_were_a_row_taken_for_anothers_the_comparison_would_see_it():
    axis = data_axis()
    split = RowSplit("words", ROWS, WIDTH, axis)
    whole = whole_table()
    part = split.take(whole).flip(0)
    [ranges] = blocks_of_chunks(split, ROWS)
    assert not torch.equal(
        RowOrder(split).collect(part, ranges), whole[ranges[axis.rank].start : ranges[axis.rank].stop]
    )


def test_a_block_has_at_least_a_row(monkeypatch):
    monkeypatch.setattr(natural, "BLOCK_BYTES", 100)
    assert [block_rows_of(row_bytes) for row_bytes in (1, 30, 1000, 0)] == [100, 3, 1, 100]


@on_ranks(2)
def test_a_table_of_fewer_rows_than_ranks_leaves_some_without_a_chunk():
    axis = data_axis()
    split = RowSplit("words", 1, WIDTH, axis)
    assert [len(chunk_of(split, rank)) for rank in range(2)] == [1, 0]
    part = split.take(whole_table(1))
    [ranges] = blocks_of_chunks(split, 10)
    assert len(RowOrder(split).collect(part, ranges)) == len(ranges[axis.rank])
    assert Hashed(1, 2).places == 1
