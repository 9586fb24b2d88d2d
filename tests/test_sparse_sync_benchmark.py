"""The pure parts of `benchmarks/sparse-sync`: what is generated, what is kept, and what is made of the results."""

from __future__ import annotations

import sys
from itertools import combinations
from pathlib import Path

import numpy
import pytest
import torch

FOLDER = Path(__file__).parents[1] / "benchmarks" / "sparse-sync"


@pytest.fixture(autouse=True)
def benchmark_on_path(monkeypatch):
    """Its modules have plain names (`job`, `grid`): they are forgotten again, so that no other test meets them."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(FOLDER))
    yield
    for name in set(sys.modules) - before:
        if FOLDER in Path(getattr(sys.modules[name], "__file__", None) or "/").parents:
            del sys.modules[name]


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_every_point_of_the_grid_has_the_density_overlap_and_skew_it_asks_for(ranks):
    from grid import GRID, draw

    for point in GRID:
        rows = draw(point, ranks, seed=1)
        assert all(len(numpy.unique(held)) == point.rows_per_rank for held in rows)
        for one, other in combinations(rows, 2):
            assert len(numpy.intersect1d(one, other)) == round(point.overlap * point.rows_per_rank)
        edge = len(numpy.array_split(numpy.arange(point.num_rows), ranks)[0])
        in_first = [(held < edge).mean() * ranks for held in rows]
        assert max(in_first) == pytest.approx(min(ranks, point.skew), rel=0.05)
        assert max(held.max() for held in rows) < point.num_rows


def test_a_point_that_cannot_be_is_refused():
    from grid import Point, draw

    with pytest.raises(ValueError, match=r"rows, .* are asked for"):
        draw(Point(num_rows=100, width=4, rows_per_rank=60, overlap=0.1), ranks=4)


def test_the_grid_has_no_point_twice():
    from grid import GRID

    assert len({str(point) for point in GRID}) == len(GRID)


def _workload():
    from job import TableShape, Workload

    tables = (TableShape("words", 50, 4), TableShape("places", 7, 2))
    drawn = (numpy.arange(24, dtype=numpy.int32).reshape(2, 3, 4), numpy.ones((2, 3, 5), numpy.int32))
    return Workload("small", tables, drawn, "made up")


def test_a_workload_is_read_as_it_was_written(tmp_path):
    from job import Workload

    written = _workload()
    written.save(tmp_path / "small")
    read = Workload.load(tmp_path / "small")
    assert (read.name, read.tables, read.about) == (written.name, written.tables, written.about)
    assert [ids.tolist() for ids in read.ids(1, 4)] == [[16, 17, 18, 19], [1] * 5]  # step 4 is step 1 again
    assert read.ids(0, 0)[0].dtype == torch.int64
    assert read.rows_touched(0) == [5, 5, 5]


def test_the_model_has_the_same_weights_each_time_and_sparse_gradients_if_asked():
    from job import build_model

    workload = _workload()
    one, other = build_model(workload, sparse=True), build_model(workload, sparse=False)
    for mine, theirs in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    for model in (one, other):
        model(workload.ids(0, 0)).backward()
    assert one.tables[0].weight.grad.is_sparse
    torch.testing.assert_close(one.tables[0].weight.grad.to_dense(), other.tables[0].weight.grad)


def test_each_rank_reads_its_own_part_of_the_text():
    from workloads import deal

    lines = [[number] * 3 for number in range(8)]
    drawn = deal(lines, lambda line: line, 3, ranks=4, steps=2)
    assert drawn[:, :, 0].tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    with pytest.raises(ValueError, match=r"rank 0's part of the text has 6 tokens, expected 9"):
        deal(lines, lambda line: line, 3, ranks=4, steps=3)


def _round(**seconds):
    return {
        way: {
            "is_peer": not way.startswith("ours"),
            "is_sharded": way == "split",
            "errors": {},
            "workloads": {"text": {"step_s": [step_s, step_s, 9.0], "local_step_s": [1.0, 1.0, 5.0]}},
        }
        for way, step_s in seconds.items()
    }


def test_ratios_are_taken_within_a_round():
    from figures import best, ratios, step_s, ways_of

    rounds = [_round(ours=2.0, peer=4.0, split=1.5), _round(ours=3.0, peer=5.0), {"peer": _round(peer=9.0)["peer"]}]
    assert ratios(rounds, "peer", "ours", "text") == [3.0, 2.0]
    assert ratios(rounds, "peer", "ours", "text", step_s) == [2.0, pytest.approx(5 / 3)]
    assert ways_of(rounds, peers=True, sharded=False) == ["peer"]
    assert best(rounds, ["ours", "peer"], "text") == "ours"
    assert best(rounds, ["ours"], "another text") is None


def test_a_choice_is_held_against_the_best_scheme_that_was_measured():
    from figures import grid_figures

    def run(measured_s, predicted_s, sent):
        sizes = {"measured_bytes": sent, "predicted_bytes": 100}
        return {"measured_s": measured_s, "all_measured_s": [measured_s] * 8, "predicted_s": predicted_s} | sizes

    points = [
        {"auto_s": [1.01] * 8, "schemes": {"ring": run(1.0, 1.1, 100), "block": run(2.0, 2.0, 100)}},
        {"auto_s": [1.5] * 8, "schemes": {"ring": run(1.0, 1.4, 80), "block": run(1.5, 1.5, 100)}},
    ]
    figures = grid_figures(points)
    assert (figures.near_best, figures.far_from_best, figures.worst_choice.middle) == (1, 1, 1.5)
    assert figures.worst_bytes_error == pytest.approx(0.25)
    assert figures.median_seconds_error == pytest.approx(0.05)


def _noisy(seed, rounds, middle=1.0):
    return (middle * (1 + 0.1 * numpy.random.default_rng(seed).standard_normal(rounds))).tolist()


def test_the_best_of_many_equal_ways_is_no_faster_than_they_are():
    from race import held_against_best

    ratios, naive = [], []
    for trial in range(200):
        others = {str(name): _noisy([trial, name], 24) for name in range(9)}
        one = _noisy([trial, 99], 24)
        ratios.append(held_against_best(one, others))
        naive.append(numpy.median(one) / min(numpy.median(times) for times in others.values()))
    assert numpy.mean([ratio.middle for ratio in ratios]) == pytest.approx(1.0, abs=0.01)
    assert numpy.mean([ratio.low <= 1.0 <= ratio.high for ratio in ratios]) > 0.9
    assert numpy.mean(naive) > 1.03, "what is compared with the least of noisy medians loses"


def test_a_way_that_is_slower_than_the_best_is_found_out():
    from race import Ratio, held_against_best

    ratio = held_against_best(_noisy(1, 96, 1.2), {"fast": _noisy(2, 96), "slow": _noisy(3, 96, 1.5), "gone": [0.1]})
    assert ratio.is_missed
    assert ratio.low < 1.2 < ratio.high
    assert Ratio.of([1.0, 1.2]) == Ratio(1.1, 1.0, 1.2)  # too few for 95%: all of them
    assert not Ratio.of([1.0, 1.2]).is_met


def test_rounds_go_on_until_it_is_certain_which_way_is_near_the_best():
    from race import LEAST_ROUNDS, MOST_ROUNDS, race

    def timed(middles, spread):
        generator = numpy.random.default_rng(4)
        return lambda name: middles[name] * (1 + spread * generator.standard_normal())

    quick = race("one", ["a", "b"], timed({"one": 1.0, "a": 1.0, "b": 9.0}, 0.001), budget_s=1e9)
    assert {name: len(times) for name, times in quick.items()} == {"one": 6, "a": 6, "b": 6}
    long = race("one", ["a", "b"], timed({"one": 1.05, "a": 1.0, "b": 9.0}, 0.1), budget_s=1e9)
    assert len(long["b"]) == LEAST_ROUNDS, "what is far behind drops out"
    assert LEAST_ROUNDS < len(long["one"]) == len(long["a"]) <= MOST_ROUNDS
    hurried = race("one", ["a", "b"], timed({"one": 1.05, "a": 1.0, "b": 9.0}, 0.1), budget_s=20)
    assert len(hurried["one"]) == 12


def test_a_step_takes_as_long_as_on_the_slowest_rank():
    from runner import merge

    rank = {"sent_bytes_per_step": 4.0, "peak_resident_bytes": 7, "resident_bytes_before": None, "versions": {}}
    rank |= {"more": {}, "rows_touched": [1, 3], "local_step_s": [1.0, 1.0]}
    merged = merge([rank | {"step_s": [1.0, 5.0]}, rank | {"step_s": [2.0, 3.0], "sent_bytes_per_step": 6.0}])
    assert merged["step_s"] == [2.0, 5.0]
    assert merged["sent_bytes_per_step"] == {"mean": 5.0, "most": 6.0}


def test_a_setting_knows_its_rate():
    from runner import Setting

    assert Setting(4, "1gbit").bytes_per_s == 1.25e8
    assert Setting(4, "250mbit").bytes_per_s == 3.125e7
    assert Setting(4, "none").bytes_per_s is None


def test_only_what_is_between_the_markers_is_replaced():
    from report import BEGIN, END, between_markers

    assert between_markers(f"a{BEGIN}old{END}b", "new") == f"a{BEGIN}\n\nnew\n\n{END}b"
    with pytest.raises(ValueError, match="expected"):
        between_markers("no markers", "new")
