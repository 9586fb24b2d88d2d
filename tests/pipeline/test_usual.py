"""A step that says into how many micro-batches it cuts is followed, and told once if stages were cut for others."""

import logging

import pytest
from torch import nn

from tulle.pipeline import Usual, make_usual
from tulle.pipeline.usual import micro_batches_of


@pytest.mark.parametrize(
    ("usual", "asked", "taken", "lines"),
    [
        (Usual(2, is_told=True), 4, 4, 1),
        (Usual(2, is_told=True), 2, 2, 0),
        (Usual(2, is_told=True), None, 2, 0),
        (Usual(2), 4, 4, 0),
    ],
)
def test_another_number_than_the_plan_s_is_told_once(usual, asked, taken, lines, caplog):
    model = nn.Linear(1, 1)
    make_usual(model, usual)
    with caplog.at_level(logging.WARNING, "tulle"):
        assert [micro_batches_of([model], asked) for _ in range(3)] == [taken] * 3
    assert len(caplog.messages) == lines
    assert all("makes 2, and the step makes 4" in one for one in caplog.messages)


def test_a_model_without_a_plan_is_cut_as_the_step_says():
    assert micro_batches_of([nn.Linear(1, 1)], 3) == 3
    assert micro_batches_of([nn.Linear(1, 1)], None) == 1
