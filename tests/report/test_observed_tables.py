"""What was observed of the tables, against values computed by hand."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from fake_run import Fake, candidate, make_run, write_json, write_lines
from fake_sparsity import observation

from tulle.report import read, summarize
from tulle.report.characteristics import observed_tables


def recorded(folder: Path, *lines: dict, ranks: int = 4) -> Path:
    folder.mkdir(exist_ok=True)
    write_json(folder / "run.json", {"processes": ranks})
    write_lines(folder / "rank-0.jsonl", list(lines))
    return folder


def test_numbers_are_medians_over_the_observations_after_the_first_five_steps(tmp_path: Path) -> None:
    lines = [
        observation(step, density=0.5, overlap_ratio=overlap, measured_s=measured_s, skewness_ratio=2.0)
        for step, overlap, measured_s in ((4, 0.9, 9.0), (8, 0.1, 0.001), (16, 0.2, 0.002), (32, 0.6, None))
    ]
    (table,) = observed_tables(read(recorded(tmp_path / "run", *lines)))
    assert (table.name, table.rows, table.width, table.ranks) == ("source.weight", 8000, 256, 4)
    assert table.observations == 4
    assert table.characteristics.overlap_ratio == 0.2
    assert table.measured["allgather"].seconds == pytest.approx(0.0015)
    assert table.densification.tolist() == [round((k + 1) ** 0.8, 3) for k in range(4)]
    assert table.parts == pytest.approx(np.array([8, 4, 2, 1]) / 15)
    assert table.overlap is not None
    assert np.diagonal(table.overlap).tolist() == [1.0] * 4


def test_a_run_of_few_steps_keeps_its_first_observations(tmp_path: Path) -> None:
    lines = [observation(step, overlap_ratio=0.3) for step in (1, 2)]
    (table,) = observed_tables(read(recorded(tmp_path / "run", *lines)))
    assert table.characteristics.overlap_ratio == 0.3


def test_density_is_of_every_step_where_the_ranks_recorded_their_rows(tmp_path: Path) -> None:
    def step(number: int, rows: int) -> dict:
        sent = {"scheme": "allgather", "bytes_sent": 10, "messages": 1, "rows": rows}
        return {"kind": "step", "step": number, "step_s": 0.1, "traffic": {"source.weight": sent}}

    folder = recorded(tmp_path / "run", step(1, 80), step(2, 160), observation(2), step(3, 240), ranks=2)
    write_lines(folder / "rank-1.jsonl", [step(1, 160), step(2, 320), step(3, 480)])
    (table,) = observed_tables(read(folder))
    assert table.steps.tolist() == [1, 2, 3]
    assert table.density == pytest.approx(np.array([0.015, 0.03, 0.045]))  # means 120, 240, 360 of 8,000 rows
    assert (table.lowest_density, table.highest_density) == pytest.approx((0.015, 0.045))


def test_density_is_of_the_observed_steps_where_they_did_not(tmp_path: Path) -> None:
    lines = [observation(1) | {"density": 0.25}, observation(8) | {"density": 0.5}]
    (table,) = observed_tables(read(recorded(tmp_path / "run", *lines)))
    assert (table.steps.tolist(), table.density.tolist()) == ([1, 8], [0.25, 0.5])


def test_the_table_with_the_most_touched_bytes_comes_first(tmp_path: Path) -> None:
    lines = [observation(8, "small.weight", density=0.01), observation(8, "large.weight", density=0.3)]
    assert [table.name for table in observed_tables(read(recorded(tmp_path / "run", *lines)))] == [
        "large.weight",
        "small.weight",
    ]


def test_what_was_measured_is_told_apart_by_scheme(tmp_path: Path) -> None:
    lines = [
        observation(8, scheme="densify", measured_s=0.012, measured_bytes=12_000_000),
        observation(16, scheme="balanced", measured_s=0.004, measured_bytes=500_000),
    ]
    (table,) = observed_tables(read(recorded(tmp_path / "run", *lines)))
    assert table.scheme == "balanced"
    assert {name: (taken.seconds, taken.bytes) for name, taken in table.measured.items()} == {
        "densify": (0.012, 12_000_000),
        "balanced": (0.004, 500_000),
    }
    assert table.predicted is not None
    assert table.predicted.seconds == 0.0031


def test_candidates_are_the_cheapest_first(tmp_path: Path) -> None:
    (table,) = observed_tables(read(recorded(tmp_path / "run", observation(8))))
    assert [one.scheme for one in table.candidates] == ["allgather", "balanced", "densify"]


def test_after_a_restart_on_fewer_ranks_only_they_count(tmp_path: Path) -> None:
    lines = [observation(8, ranks=4), observation(16, ranks=2), observation(32, ranks=2)]
    (table,) = observed_tables(read(recorded(tmp_path / "run", *lines)))
    assert (table.ranks, table.observations, len(table.parts)) == (2, 2, 2)


def test_what_a_resume_undid_does_not_count(tmp_path: Path) -> None:
    steps = [{"kind": "step", "step": step, "step_s": 0.1} for step in range(1, 9)]
    lines = [*steps, observation(8, overlap_ratio=0.9), *steps[5:], observation(7, overlap_ratio=0.2)]
    rank = read(recorded(tmp_path / "run", *lines)).ranks[0]
    assert [(one.step, one.characteristics.overlap_ratio) for one in rank.observations] == [(7, 0.2)]


@pytest.mark.parametrize(
    "odd",
    [
        {"rows_per_rank": []},
        {"rows_per_rank": 7},
        {"density": "much"},
        {"parts": [1.0]},
        {"parts": [1.0, math.nan, 0.0, 0.0]},
        {"overlap": [[1.0]]},
        {"densification_curve": None},
        {"candidates": [{"scheme": "densify"}]},
        {"candidates": "all"},
        {"measured_s": "soon"},
    ],
)
def test_an_odd_line_is_left_out_and_counted(tmp_path: Path, odd: dict) -> None:
    rank = read(recorded(tmp_path / "run", observation(4), observation(8) | odd)).ranks[0]
    assert [one.step for one in rank.observations] == [4]
    assert (rank.odd_lines, rank.torn_lines) == (1, 0)


@pytest.mark.parametrize("missing", ["table", "num_rows", "density", "overlap_ratio", "parts", "scheme"])
def test_a_line_without_one_of_its_numbers_is_left_out(tmp_path: Path, missing: str) -> None:
    line = observation(8)
    del line[missing]
    rank = read(recorded(tmp_path / "run", line)).ranks[0]
    assert (rank.observations, rank.odd_lines) == ((), 1)


def test_a_torn_line_is_skipped(tmp_path: Path) -> None:
    folder = recorded(tmp_path / "run", observation(4))
    with (folder / "rank-0.jsonl").open("a") as log:
        log.write(json.dumps(observation(8))[:300])
    rank = read(folder).ranks[0]
    assert ([one.step for one in rank.observations], rank.torn_lines, rank.odd_lines) == ([4], 1, 0)


def test_the_overlap_of_each_pair_may_be_missing(tmp_path: Path) -> None:
    (table,) = observed_tables(read(recorded(tmp_path / "run", observation(8, ranks=65), ranks=65)))
    assert table.overlap is None
    assert table.characteristics.overlap_ratio == 0.27


def test_the_summary_has_each_table(tmp_path: Path) -> None:
    offers = [candidate("allgather", 600, 6, 0.002), candidate("densify", 9000, 6, 0.01)]
    line = observation(8, candidates=offers, measured_s=0.003, measured_bytes=660, density=0.25)
    folder = recorded(tmp_path / "run", line | {"density": 0.25, "skewness_ratio": 2.5})
    summary = summarize(folder)
    assert json.loads(json.dumps(summary, allow_nan=False)) == summary
    assert summary["tables"] == {
        "source.weight": {
            "rows": 8000,
            "width": 256,
            "ranks": 4,
            "density": 0.25,
            "lowest_density": 0.25,
            "highest_density": 0.25,
            "overlap_ratio": 0.27,
            "densification_ratio": 3.031,
            "skewness_ratio": 2.5,
            "scheme": "allgather",
            "predicted": {"bytes": 600.0, "messages": 6.0, "seconds": 0.002},
            "measured": {"bytes": 660.0, "messages": None, "seconds": 0.003},
            "candidates": [
                {"scheme": "allgather", "bytes": 600.0, "messages": 6.0, "seconds": 0.002},
                {"scheme": "densify", "bytes": 9000.0, "messages": 6.0, "seconds": 0.01},
            ],
        }
    }


def test_a_run_that_observed_nothing_has_no_tables_in_its_summary(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", Fake(ranks=2, steps=9))
    assert "tables" not in summarize(folder)
    assert observed_tables(read(folder)) == ()


def test_what_several_ranks_observed_counts_once(tmp_path: Path) -> None:
    folder = recorded(tmp_path / "run", observation(8, measured_s=0.001), ranks=2)
    write_lines(folder / "rank-1.jsonl", [observation(8, measured_s=0.003), observation(16, measured_s=0.003)])
    (table,) = observed_tables(read(folder))
    assert table.observations == 2
    assert table.measured["allgather"].seconds == pytest.approx(0.002)
