"""A model of very many small pieces is cut into stages as well as one of few, and in time."""

from dataclasses import replace
from importlib import import_module

import pytest

from profiles import cluster_of, network, profile_of
from tulle.cost import NOTHING
from tulle.memory import Memory
from tulle.plan import Space, best_plan
from tulle.plan.cutting import MOST_GROUPS, fast_cut, grouped
from tulle.plan.plan import BUCKET_BYTES
from tulle.plan.space import cuts
from tulle.plan.work import Work

search = import_module("tulle.plan.search")  # tulle.plan, the function, hides the package


def chain(count, seconds=lambda number: 1e-3):
    return [
        Work(f"h.{n}", n, 0, seconds(n), 0.0, 0, 0, NOTHING, NOTHING, {f"h.{n - 1}": 1000} if n else {}, 0)
        for n in range(count)
    ]


def test_thousands_of_pieces_are_cut_evenly():
    works = chain(3000)
    stages = fast_cut(works, 4, network())
    assert list(stages) == sorted(stages)
    assert [stages.count(stage) for stage in range(4)] == pytest.approx([750] * 4, rel=4 / MOST_GROUPS)


def test_few_pieces_are_cut_between_any_two():
    works = chain(2 * MOST_GROUPS)
    assert [len(group) for group in grouped(works, MOST_GROUPS)] == [1] * len(works)


def test_a_piece_that_takes_long_is_a_group_of_its_own():
    works = chain(1000, lambda number: 1.0 if number == 500 else 1e-3)
    assert [works[500]] in grouped(works, MOST_GROUPS)


@pytest.mark.parametrize(
    ("seed", "pipe", "bytes_per_s"),
    [(7, 2, 1e5), (7, 2, 1e8), (2, 4, 1e6), (5, 4, 1e8), (5, 4, 1e10)],
    ids=["updates count", "gradients are sent", "everything on one stage", "part is hidden", "links are free"],
)
def test_the_plan_of_one_cut_is_nearly_the_best_of_all_cuts(seed, pipe, bytes_per_s, monkeypatch):
    cluster = cluster_of(4, bandwidth_bytes_per_s=bytes_per_s)
    profile = replace(profile_of(seed, layers=9), tables=())
    space = Space(
        mesh={"pipe": pipe, "model": 1}, memories=(Memory(),), schedules=("step",), buckets_bytes=(BUCKET_BYTES,)
    )

    def step_s(cuts):
        monkeypatch.setattr(search, "cuts", cuts)
        return best_plan(profile, cluster, space=space).prediction.step_s

    def every(pieces, stages):
        return [cut for count in range(1, stages + 1) for cut in cuts(pieces, count)]

    monkeypatch.setattr(search, "MOST_WORK", 10**9)
    monkeypatch.setattr(search, "MOST_CUTS", 10**9)
    best_s = step_s(every)
    monkeypatch.setattr(search, "MOST_CUTS", 0)
    assert step_s(cuts) < 1.05 * best_s
