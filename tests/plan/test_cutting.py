"""A model of very many small pieces is cut into stages as well as one of few, and in time."""

import pytest

from profiles import network
from tulle.cost import NOTHING
from tulle.plan.cutting import MOST_GROUPS, fast_cuts, grouped
from tulle.plan.work import Work


def chain(count, seconds=lambda number: 1e-3):
    return [
        Work(f"h.{n}", n, 0, seconds(n), 0.0, 0, 0, NOTHING, NOTHING, {f"h.{n - 1}": 1000} if n else {}, 0)
        for n in range(count)
    ]


def test_thousands_of_pieces_are_cut_evenly():
    works = chain(3000)
    for stages in fast_cuts(works, 4, network()):
        assert list(stages) == sorted(stages)
        assert [stages.count(stage) for stage in range(4)] == pytest.approx([750] * 4, rel=4 / MOST_GROUPS)


def test_few_pieces_are_cut_between_any_two():
    works = chain(2 * MOST_GROUPS)
    assert [len(group) for group in grouped(works, MOST_GROUPS)] == [1] * len(works)


def test_a_piece_that_takes_long_is_a_group_of_its_own():
    works = chain(1000, lambda number: 1.0 if number == 500 else 1e-3)
    assert [works[500]] in grouped(works, MOST_GROUPS)
