"""What is told of tables that travel as one."""

from types import SimpleNamespace
from typing import cast

from tulle.cost import Characteristics, Cost
from tulle.engine.bundle import Bundle
from tulle.sync import Choice, Chooser

LOOKS = Characteristics(num_rows=100, width=4, value_bytes=4, rows_per_rank=(5, 5))
COSTS = (("allgather", Cost(80, 3, 0.013)), ("ring", Cost(60, 4, 0.008)))


def bundle_of(packet_s: float) -> Bundle:
    chooser = cast("Chooser", SimpleNamespace(scheme="ring"))
    return Bundle("auto", chooser, {"words": Choice("ring", "few rows", LOOKS, COSTS)}, packet_s=packet_s)


def test_what_is_gathered_in_packets_is_told_at_their_price():
    choice = bundle_of(0.007).choice("words")
    assert choice is not None
    assert choice.scheme == "allgather"
    assert choice.candidates == (("allgather", Cost(80, 3, 0.007)), ("ring", Cost(60, 4, 0.008)))
    assert choice.reason == "few rows; in one message with row numbers and counts 7 ms"


def test_without_packets_the_choice_is_as_it_was_made():
    bundle = bundle_of(0.0)
    assert bundle.choice("words") is bundle.choices["words"]
