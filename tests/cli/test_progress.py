"""The live numbers are those that the ranks recorded last."""

import json

import pytest

from tulle.cli.progress import RankProgress, RunProgress


def step(number, **more):
    return json.dumps({"kind": "step", "step": number, "step_s": 0.5, "wait_s": 0.1, "bytes_sent": 1000, **more})


def write(run, rank, *lines):
    with (run / f"rank-{rank}.jsonl").open("a") as file:
        file.writelines(f"{line}\n" for line in lines)


def test_rates_are_over_the_last_steps():
    rank = RankProgress()
    rank.add([step(1, tokens=100, step_s=50.0), *(step(number, tokens=100, loss=2.0) for number in range(2, 22))])
    assert (rank.step, rank.loss) == (21, 2.0)
    assert rank.tokens_per_s == pytest.approx(200)
    assert rank.bytes_per_step == pytest.approx(1000)
    assert rank.wait_share == pytest.approx(0.2)


def test_what_was_not_logged_is_none():
    rank = RankProgress()
    assert (rank.bytes_per_step, rank.wait_share) == (None, None)
    rank.add([step(1)])
    assert (rank.loss, rank.tokens_per_s, rank.total_steps) == (None, None, None)


@pytest.mark.parametrize("line", ["{", "[]", "7", '{"kind": "text", "step": 1}', '{"kind": "step"}', ""])
def test_a_line_that_is_no_step_is_left_out(line):
    rank = RankProgress()
    rank.add([line, step(3)])
    assert rank.step == 3


def test_the_run_is_as_far_as_its_slowest_rank(tmp_path):
    progress = RunProgress(tmp_path)
    write(tmp_path, 10, step(5, tokens=10, loss=1.0))
    write(tmp_path, 2, step(4, tokens=10, loss=3.0, total_steps=9))
    progress.update()
    assert list(progress.ranks) == [2, 10]
    assert (progress.step, progress.total_steps, progress.loss) == (4, 9, 2.0)
    assert progress.tokens_per_s == pytest.approx(40)


def test_records_of_an_earlier_run_in_the_folder_are_not_shown(tmp_path):
    write(tmp_path, 0, step(99))
    progress = RunProgress(tmp_path)
    progress.update()
    assert progress.ranks == {}
    write(tmp_path, 0, step(1))
    progress.update()
    assert progress.step == 1


def test_before_the_first_step_there_is_nothing(tmp_path):
    progress = RunProgress(tmp_path)
    progress.update()
    assert (progress.step, progress.total_steps, progress.loss, progress.tokens_per_s) == (0, None, None, None)


def test_a_run_that_takes_the_place_of_an_earlier_one_is_shown_from_its_first_step(tmp_path):
    write(tmp_path, 0, *(step(number) for number in range(100)))
    progress = RunProgress(tmp_path)
    progress.update()
    (tmp_path / "rank-0.jsonl").rename(tmp_path / "previous-rank-0.jsonl")  # as the launcher does
    write(tmp_path, 0, step(1))
    progress.update()
    assert progress.step == 1
