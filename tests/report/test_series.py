"""Columns over ranks and steps: means, thinning, and the parts of a step."""

import math
from pathlib import Path

import numpy as np
from fake_run import Fake, make_run, write_lines

from tulle.report import read
from tulle.report.series import (
    mean_over_ranks,
    over_ranks,
    parts_of_step,
    relative_difference,
    smooth,
    sum_over_ranks,
    thin,
)


def test_ranks_are_aligned_by_step(tmp_path: Path) -> None:
    for rank, steps in enumerate([(1, 2, 3), (2, 3, 4)]):
        lines = [{"kind": "step", "step": step, "loss": float(10 * rank + step)} for step in steps]
        write_lines(tmp_path / f"rank-{rank}.jsonl", lines)
    matrix = over_ranks(read(tmp_path), lambda log: log.loss)
    np.testing.assert_array_equal(matrix, [[1, 2, 3, math.nan], [math.nan, 12, 13, 14]])
    np.testing.assert_array_equal(mean_over_ranks(matrix), [1, 7, 8, 14])
    np.testing.assert_array_equal(sum_over_ranks(matrix), [1, 14, 16, 14])


def test_the_parts_of_a_step_sum_to_the_step(tmp_path: Path) -> None:
    run = read(make_run(tmp_path / "run", Fake(ranks=3, steps=20)))
    parts = parts_of_step(run)
    whole = sum(part for _, part in parts.items())
    np.testing.assert_allclose(whole, over_ranks(run, lambda log: log.step_s), rtol=1e-12)
    assert all((part >= 0).all() for _, part in parts.items())


def test_waiting_is_taken_out_of_backward_and_then_of_the_optimizer(tmp_path: Path) -> None:
    step = {"kind": "step", "step": 1, "step_s": 10.0, "forward_s": 2.0, "backward_s": 3.0, "optimizer_s": 4.0}
    write_lines(tmp_path / "rank-0.jsonl", [step | {"wait_s": 5.0}])
    parts = {name: part.item() for name, part in parts_of_step(read(tmp_path)).items()}
    assert parts == {"forward": 2.0, "backward": 0.0, "waiting": 5.0, "optimizer": 2.0, "other": 1.0}


def test_waiting_is_taken_out_of_the_part_that_it_was_in(tmp_path: Path) -> None:
    """Of split tables a rank waits in forward for rows, and between steps for those of the next batch."""
    step = {"kind": "step", "step": 1, "step_s": 10.0, "forward_s": 2.0, "backward_s": 3.0, "optimizer_s": 2.0}
    waits = {"wait_s": 5.0, "forward_wait_s": 1.5, "backward_wait_s": 0.5, "optimizer_wait_s": 1.0}
    write_lines(tmp_path / "rank-0.jsonl", [step | waits])
    parts = {name: part.item() for name, part in parts_of_step(read(tmp_path)).items()}
    assert parts == {"forward": 0.5, "backward": 2.5, "waiting": 5.0, "optimizer": 1.0, "other": 1.0}


def test_thinning_keeps_mean_and_range() -> None:
    steps, series = np.arange(1, 100_001), np.tile([1.0, 3.0], 50_000)
    thinned = thin(steps, series, points=100)
    assert len(thinned.mean) == 100
    np.testing.assert_allclose(thinned.mean, 2.0)
    np.testing.assert_array_equal(thinned.low, 1.0)
    np.testing.assert_array_equal(thinned.high, 3.0)
    assert (thinned.edges[0], thinned.edges[-1]) == (0.5, 100_000.5)


def test_thinning_leaves_out_what_was_not_logged_and_keeps_a_gap_for_infinity() -> None:
    thinned = thin(np.arange(1, 5), np.array([1.0, math.nan, math.inf, 4.0]))
    np.testing.assert_array_equal(thinned.steps, [1, 3, 4])
    np.testing.assert_array_equal(thinned.mean, [1, math.nan, 4])


def test_a_running_mean_is_centred() -> None:
    np.testing.assert_allclose(smooth(np.array([0.0, 3.0, 6.0, 9.0]), 3), [1.5, 3.0, 6.0, 7.5])


def test_two_runs_are_compared_at_their_common_steps() -> None:
    steps, difference = relative_difference(
        (np.array([1, 2, 3]), np.array([2, 3, 4])), (np.array([9.0, 2.2, 3.0]), np.array([2.0, 3.0, 7.0]))
    )
    assert steps.tolist() == [2, 3]
    np.testing.assert_allclose(difference, [0.1, 0.0])
