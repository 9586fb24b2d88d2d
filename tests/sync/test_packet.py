"""One message a rank: what it holds is what comes out, for every width, dtype and kind of gradient."""

import pytest
import torch

import tulle
from ranks import on_ranks
from tulle.cost import Characteristics, Network
from tulle.mesh import Axis
from tulle.rows import RowSparse
from tulle.sync import ABSENT, DENSE, Gradient, Packet, Room, Table, count, next_packet, sum_gradients
from tulle.sync.packet import WORDS, Section, packet_cost, room_for

ROOM = 9


def table(number: int, width: int, dtype: torch.dtype, wire_dtype: torch.dtype | None) -> Table:
    return Table(f"table {number}", 20 + number, width, dtype, torch.device("cpu"), wire_dtype)


def gradient(of: Table, rank: int, rows: int) -> RowSparse:
    """Some rows, others on each rank, some on all."""
    generator = torch.Generator().manual_seed(100 * rank + of.num_rows)
    numbers = torch.randperm(of.num_rows, generator=generator)[:rows].sort().values
    values = torch.randn(rows, of.width, generator=generator, dtype=torch.float64).to(of.dtype)
    return RowSparse.trusted(numbers, values, of.num_rows, is_coalesced=True)


def packet_of(tables: list[Table], words: int, room: int = ROOM) -> Packet:
    """With as much room for tables of each width and dtype."""
    members: dict[object, list[int]] = {}
    for position, of in enumerate(tables):
        members.setdefault((of.width, of.dtype), []).append(position)
    return Packet(tables, [Section(positions, room) for positions in members.values()], words)


def summed(packet: Packet, gradients: list[Gradient], axis: Axis) -> list[RowSparse] | None:
    counts = [count(one) for one in gradients]
    exchanged = packet.exchange([*counts, 7 + axis.rank], gradients, axis).wait()
    words = exchanged.words()
    assert [of_rank[-1] for of_rank in words] == [7 + rank for rank in range(axis.size)]
    return exchanged.sum([of_rank[: len(gradients)] for of_rank in words])


@on_ranks(1, 2, 3, 4)
@pytest.mark.parametrize("wire_dtype", [None, torch.bfloat16], ids=str)
def test_sums_are_those_of_the_scheme_that_gathers_bit_for_bit(wire_dtype):
    axis = tulle.init(data=-1)["data"]
    double, single, half = torch.float64, torch.float32, torch.float16
    kinds = [[(width, dtype)] * 3 for width in (1, 3, 8, 129) for dtype in (double, single, half)]
    kinds += [[(1, single), (16, single), (1, single)], [(10, single), (7, single), (1, single)]]
    kinds += [[(16, half), (1, double), (5, torch.bfloat16)], [(3, double), (129, half), (3, single)]]
    for kind in kinds:
        tables = [table(number, *of, wire_dtype) for number, of in enumerate(kind)]
        rows = [[2, 4, 3], [0, 1, 0], [4, 0, 5], [0, 9, 0]][axis.rank]
        gradients: list[Gradient] = [gradient(of, axis.rank, n) for of, n in zip(tables, rows, strict=True)]
        if axis.rank == 1:
            gradients[2] = None
        counts = [[2, 4, 3], [0, 1, ABSENT], [4, 0, 5], [0, 9, 0]][: axis.size]
        expected = sum_gradients(gradients, tables, counts, ["allgather"] * 3, axis).wait()
        ours = summed(packet_of(tables, 4), gradients, axis)
        for mine, theirs, (_, dtype) in zip(ours, expected, kind, strict=True):
            assert torch.equal(mine.indices, theirs.indices)
            assert torch.equal(mine.values, theirs.values)
            assert mine.values.dtype == dtype


@on_ranks(3)
def test_what_does_not_fit_on_one_rank_is_no_sum_on_any():
    axis = tulle.init(data=-1)["data"]
    tables = [table(number, 4, torch.float64, None) for number in range(2)]
    packet = packet_of(tables, 3)
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


@on_ranks(2)
def test_rows_of_one_width_have_no_room_among_those_of_another():
    axis = tulle.init(data=-1)["data"]
    tables = [table(0, 1, torch.float32, None), table(1, 16, torch.float32, None)]
    packet = Packet(tables, [Section([0], 4), Section([1], 6)], 3)
    for rows, fits in (((4, 6), True), ((5, 1), False), ((1, 7), False), ((0, 6), True)):
        of_last = rows if axis.rank else (4, 6)
        sums = summed(packet, [gradient(of, 0, n) for of, n in zip(tables, of_last, strict=True)], axis)
        assert (sums is not None) == fits, rows


def test_predicted_bytes_are_those_of_the_message():
    narrow, wide = table(0, 3, torch.float32, None), table(1, 16, torch.float32, None)
    one = packet_of([narrow], 1, 10)
    assert one.bytes == 168, "10 rows of 12 bytes, 10 numbers of 4, a word of 8, in whole 24 bytes"
    assert packet_of([narrow], 2, 10).bytes == 192
    both = Packet([narrow, wide], [Section([0], 10), Section([1], 3)], 2)
    assert both.bytes == 384, "160 + 3 rows of 64 bytes, 3 numbers of 4, padded to 8, 2 words, in whole 192 bytes"
    assert not one.holds([DENSE])
    assert one.holds([10])
    assert not one.holds([11])
    looks = [Characteristics(of.num_rows, of.width, 4, (7, 2)) for of in (narrow, wide)]
    network = Network(latency_s=1e-3, bandwidth_bytes_per_s=1e8)
    priced = packet_cost(looks, 2, network, 2)
    sent = packet_of([narrow, wide], 2 * WORDS, room_for(7))
    assert (priced.bytes, priced.seconds) == (sent.bytes, sent.seconds(network, 2)), "by the planner and the run-time"


def next_of(rows: float, last: Packet | None = None, dtype: torch.dtype = torch.float32) -> Packet | None:
    slow = Network(latency_s=1e-3, bandwidth_bytes_per_s=1e8)
    rooms = [([0], Room(fullest_rows=rows))]
    return next_packet([table(0, 4, dtype, None)], rooms, slow, 2, words=WORDS, scheme_s=1.0, last=last)


def test_a_packet_stays_while_it_has_about_the_room_that_is_needed():
    first = next_of(1000.0)
    assert first is not None
    assert next_of(996.0, first) is first
    fewer, more = next_of(900.0, first), next_of(1001.0, first)
    assert fewer is not None
    assert more is not None
    assert fewer.bytes < first.bytes < more.bytes
    other = next_of(1000.0, first, torch.float64)
    assert other is not None
    assert other.bytes > first.bytes
