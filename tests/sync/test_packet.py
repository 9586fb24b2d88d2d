"""One message a rank: what it holds is what comes out, for every width, dtype and kind of gradient."""

import pytest
import torch

import tulle
from ranks import on_ranks
from tulle.mesh import Axis
from tulle.rows import RowSparse
from tulle.sync import ABSENT, DENSE, Gradient, Packet, Table, count, sum_gradients

ROOM = 9


def table(number: int, width: int, dtype: torch.dtype, wire_dtype: torch.dtype | None) -> Table:
    return Table(f"table {number}", 20 + number, width, dtype, torch.device("cpu"), wire_dtype)


def gradient(of: Table, rank: int, rows: int) -> RowSparse:
    """Some rows, others on each rank, some on all."""
    generator = torch.Generator().manual_seed(100 * rank + of.num_rows)
    numbers = torch.randperm(of.num_rows, generator=generator)[:rows].sort().values
    values = torch.randn(rows, of.width, generator=generator, dtype=torch.float64).to(of.dtype)
    return RowSparse.trusted(numbers, values, of.num_rows, is_coalesced=True)


def summed(packet: Packet, gradients: list[Gradient], axis: Axis) -> list[RowSparse] | None:
    counts = [count(one) for one in gradients]
    exchanged = packet.exchange([*counts, 7 + axis.rank], gradients, axis).wait()
    words = exchanged.words()
    assert [of_rank[-1] for of_rank in words] == [7 + rank for rank in range(axis.size)]
    return exchanged.sum([of_rank[: len(gradients)] for of_rank in words])


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("wire_dtype", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16], ids=str)
def test_sums_are_those_of_the_scheme_that_gathers_bit_for_bit(dtype, wire_dtype):
    axis = tulle.init(data=-1)["data"]
    for width in (1, 3, 8, 129):
        tables = [table(number, width, dtype, wire_dtype) for number in range(3)]
        rows = [[2, 4, 3], [0, 1, 0], [4, 0, 5]][axis.rank]
        gradients: list[Gradient] = [gradient(of, axis.rank, n) for of, n in zip(tables, rows, strict=True)]
        if axis.rank == 1:
            gradients[2] = None
        counts = [[2, 4, 3], [0, 1, ABSENT], [4, 0, 5]][: axis.size]
        expected = sum_gradients(gradients, tables, counts, ["allgather"] * 3, axis).wait()
        ours = summed(Packet(tables, ROOM, 4), gradients, axis)
        for mine, theirs in zip(ours, expected, strict=True):
            assert torch.equal(mine.indices, theirs.indices)
            assert torch.equal(mine.values, theirs.values)
            assert mine.values.dtype == dtype


@on_ranks(3)
def test_what_does_not_fit_on_one_rank_is_no_sum_on_any():
    axis = tulle.init(data=-1)["data"]
    tables = [table(number, 4, torch.float64, None) for number in range(2)]
    packet = Packet(tables, ROOM, 3)
    is_last = axis.rank == axis.size - 1

    def of(first: Gradient, second: Gradient) -> list[RowSparse] | None:
        usual: list[Gradient] = [gradient(each, axis.rank, 4) for each in tables]
        return summed(packet, [first, second] if is_last else usual, axis)

    fits = [gradient(each, axis.rank, 4) for each in tables]
    assert of(*fits) is not None
    assert of(fits[0], gradient(tables[1], 0, ROOM - 4)) is not None
    assert of(fits[0], gradient(tables[1], 0, ROOM - 3)) is None, "one row too many"
    assert of(fits[0], fits[1].to_dense()) is None
    assert of(fits[0], None) is not None
    assert summed(packet, [fits[0], None], axis) is None, "of a table that no rank has there is no sum"


def test_predicted_bytes_are_those_of_the_message():
    tables = [table(0, 3, torch.float32, None)]
    assert Packet(tables, 10, 1).bytes == 168, "10 rows of 12 bytes, 10 numbers of 4, a word of 8, in whole 24 bytes"
    assert Packet(tables, 10, 2).bytes == 192
    assert not Packet(tables, 10, 1).holds([DENSE])
    assert Packet(tables, 10, 1).holds([10])
    assert not Packet(tables, 10, 1).holds([11])
