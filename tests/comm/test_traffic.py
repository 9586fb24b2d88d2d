"""The counters add up what was sent, by label and in all, and the timeline holds what happened when it is asked for."""

import pytest
import torch

import tulle
from ranks import on_ranks
from tulle import comm
from tulle.comm import Traffic
from tulle.comm.traffic import Span, covered_s


def test_the_total_and_each_label_add_up():
    traffic = Traffic()
    traffic.sent("words", 100, 2)
    traffic.sent("layers", 10, 1)
    traffic.sent("words", 1, 1)
    assert (traffic.total.bytes_sent, traffic.total.messages) == (111, 4)
    labels = traffic.take_labels()
    assert {name: (count.bytes_sent, count.messages) for name, count in labels.items()} == {
        "words": (101, 3),
        "layers": (10, 1),
    }


def test_taking_the_labels_leaves_the_total():
    traffic = Traffic()
    traffic.sent("words", 100, 2)
    traffic.take_labels()
    assert traffic.take_labels() == {}
    assert traffic.total.bytes_sent == 100


@pytest.mark.parametrize(
    ("shares", "expected"),
    [
        ({"words": 30, "tags": 10}, {"words": 75, "tags": 25}),
        ({"words": 5, "tags": 0}, {"words": 100, "tags": 0}),
        ({"words": 0, "tags": 0}, {"words": 0, "tags": 0}),
    ],
)
def test_tables_that_travel_together_share_the_bytes(shares, expected):
    traffic = Traffic()
    traffic.sent(shares, 100, 6)
    labels = traffic.take_labels()
    assert {name: count.bytes_sent for name, count in labels.items()} == expected
    assert all(count.messages == 6 for count in labels.values())
    assert (traffic.total.bytes_sent, traffic.total.messages) == (100, 6)


def test_no_timeline_is_kept_unless_asked_for():
    traffic = Traffic()
    traffic.span("computation", "forward", 1.0, 2.0)
    assert traffic.take_spans() == []
    traffic.is_tracing = True
    traffic.span("computation", "forward", 1.0, 2.0)
    [span] = traffic.take_spans()
    assert (span.track, span.name, span.begin_s, span.end_s) == ("computation", "forward", 1.0, 2.0)
    assert traffic.take_spans() == []


@on_ranks(2)
def test_a_collective_is_drawn_from_its_start_to_its_end_with_its_wait():
    axis = tulle.init(data=-1)["data"]
    comm.traffic.is_tracing = True
    begin_s = comm.now_s()
    comm.all_reduce(torch.zeros(1000), axis, label="layers").wait()
    end_s = comm.now_s()
    comm.traffic.is_tracing = False
    comm.barrier(axis)  # the span of an operation is drawn by another thread, which may come after the wait
    spans = {(span.track, span.name): span for span in comm.traffic.take_spans()}
    wait, reduce = spans["waiting", "wait: layers"], spans["all-reduce", "layers"]
    assert reduce.bytes_sent == 4000
    assert begin_s <= reduce.begin_s <= wait.begin_s <= wait.end_s <= end_s


def test_time_under_way_counts_once_where_exchanges_overlap():
    spans = [Span("waiting", "a", 1.0, 3.0), Span("waiting", "b", 2.0, 2.5), Span("waiting", "c", 5.0, 6.0)]
    assert covered_s(reversed(spans)) == 3.0
    assert covered_s([]) == 0.0
