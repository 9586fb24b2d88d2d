"""The order of what travels: a simulation by hand, and the same on all ranks whatever they measure."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import tulle
from ranks import on_ranks
from tulle.cost import Network
from tulle.engine.buckets import Bucket
from tulle.engine.slots import Slot
from tulle.engine.turns import Turns, order_of_pieces

WIRE = Network(latency_s=1e-3, bandwidth_bytes_per_s=1e6)


def test_the_most_urgent_of_what_is_ready_is_sent_whenever_the_wire_is_free():
    order = order_of_pieces([0.0, 2.5, 3.0], [2, 1, 0], [[1.0] * 4, [1.0] * 3, [0.5, 0.5]])
    assert order == [(0, 0), (0, 1), (0, 2), (2, 0), (2, 1), (1, 0), (1, 1), (1, 2), (0, 3)]


def test_without_urgency_they_go_as_they_come():
    assert order_of_pieces([5.0, 0.0], [0, 0], [[1.0], [1.0, 1.0]]) == [(1, 0), (1, 1), (0, 0)]
    assert order_of_pieces([], [], []) == []


@given(st.lists(st.tuples(st.floats(0, 10), st.integers(0, 5), st.lists(st.floats(0, 3), min_size=1, max_size=4))))
def test_every_piece_is_sent_once_and_those_of_an_item_in_order(items):
    ready_s, urgency, pieces_s = ([item[part] for item in items] for part in range(3))
    order = order_of_pieces(ready_s, urgency, pieces_s)
    assert sorted(order) == [(item, piece) for item, pieces in enumerate(pieces_s) for piece in range(len(pieces))]
    for item in range(len(items)):
        assert [piece for other, piece in order if other == item] == sorted(p for other, p in order if other == item)


def complete(bucket: Bucket, value: float) -> None:
    for position, slot in enumerate(bucket.slots):
        slot.parameter.grad = torch.full_like(slot.parameter, value)
        slot.is_fired = True
        bucket.arrive(position)


@on_ranks(3)
@pytest.mark.parametrize("is_reordered", [False, True])
def test_pieces_are_reduced_alike_in_either_order(is_reordered):
    axis = tulle.init(data=-1)["data"]
    buckets = [Bucket([Slot(name, nn.Parameter(torch.zeros(50)))], axis, piece_bytes=50) for name in "abc"]
    assert [bucket.piece_sizes_bytes for bucket in buckets] == [[52, 52, 52, 48]] * 3
    turns = Turns(buckets)
    for number in range(3):
        turns.begin()
        in_turn = buckets if (axis.rank + number) % 2 else buckets[::-1]  # ranks have them ready in unlike order
        for bucket in in_turn:
            complete(bucket, float(axis.rank + number))
            turns.arrived(bucket)
        turns.end()
        if is_reordered and number == 0:
            read = buckets[::-1] if axis.rank == 0 else buckets  # what other ranks saw does not count
            turns.reorder(read, axis, WIRE)
        for bucket in buckets:
            bucket.finish()
            [(parameter, _)] = bucket.gradients
            assert parameter.grad.tolist() == pytest.approx([1.0 + number] * 50)
    names = [(item.slots[0].name, submit.args[0]) for item, submit in turns._turns]
    first = "c" if is_reordered else "a"
    assert [piece for name, piece in names if name == first] == [0, 1, 2, 3]
    everywhere: list[object] = [None] * axis.size
    torch.distributed.all_gather_object(everywhere, names)
    assert all(theirs == names for theirs in everywhere)
    assert sorted(names) == [(name, piece) for name in "abc" for piece in range(4)]
