"""The numbers of `summary.json`, against values computed by hand."""

import json
import math
from pathlib import Path

import pytest
from fake_run import write_json, write_lines

from tulle.report import read, summarize
from tulle.report.headline import headline, key_figures


def folder_of(path: Path, *ranks: list[dict]) -> Path:
    path.mkdir()
    write_json(path / "run.json", {"processes": len(ranks)})
    for rank, lines in enumerate(ranks):
        write_lines(path / f"rank-{rank}.jsonl", [{"kind": "step", **line} for line in lines])
    return path


def test_summary_is_what_one_computes_by_hand(tmp_path: Path) -> None:
    # Steps 1 to 5 are warm-up: ten times as slow, and left out of every rate. Steps 6, 7, 8 take 1, 2, 4 s.
    seconds = [10.0] * 5 + [1.0, 2.0, 4.0]

    def rank(loss: float, tokens: int, sent: int, wait_s: float) -> list[dict]:
        return [
            {
                "step": step,
                "step_s": step_s,
                "wait_s": wait_s,
                "bytes_sent": sent * step,
                "loss": loss,
                "tokens": tokens,
            }
            for step, step_s in enumerate(seconds, start=1)
        ]

    first, second = rank(2.0, 100, 1000, 0.1), rank(4.0, 300, 3000, 0.3)
    first[3]["values"] = {"bleu": 1.0, "learning_rate": 0.5}
    first[7]["values"] = {"bleu": 25.5}
    second[3]["values"] = {"learning_rate": 0.7}
    assert summarize(folder_of(tmp_path / "run", first, second)) == {
        "processes": 2,
        "steps": 8,
        "loss": 3.0,  # (2 + 4) / 2
        "tokens_per_s": 200.0,  # (100 + 300) / 2 s, the median of 400, 200, 100
        "bytes_sent_per_step": 14_000,  # (1000 + 3000) / 2 x step 7
        "wait_share": pytest.approx(1.2 / 14.0),  # 3 x (0.1 + 0.3) of 2 x (1 + 2 + 4)
        "seconds": 57.0,
        "tokens": 3200,
        "bleu": 25.5,
        "learning_rate": pytest.approx(0.6),
    }


def test_a_run_that_went_on_from_another_says_which_steps_it_trained(tmp_path: Path) -> None:
    run = read(folder_of(tmp_path / "run", [{"step": step, "step_s": 1.0, "loss": 2.0} for step in (4, 5, 6)]))
    assert headline(run).progress == "It trained steps 4 to 6."
    assert key_figures(run)[0].note == "mean of the last 3 steps"


def test_loss_is_the_mean_of_the_last_ten_logged_steps(tmp_path: Path) -> None:
    lines = [{"step": step, "step_s": 1.0} | ({"loss": float(step)} if step % 2 else {}) for step in range(1, 31)]
    summary = summarize(folder_of(tmp_path / "run", lines))
    assert summary["loss"] == sum(range(11, 30, 2)) / 10


def test_what_was_not_recorded_is_left_out(tmp_path: Path) -> None:
    assert summarize(folder_of(tmp_path / "run", [{"step": 1, "step_s": 2.0}])) == {
        "processes": 1,
        "steps": 1,
        "seconds": 2.0,
    }


def test_a_run_without_steps_has_a_summary(tmp_path: Path) -> None:
    assert summarize(folder_of(tmp_path / "run", [], [])) == {"processes": 2, "steps": 0}


def test_a_diverged_loss_is_null_in_json(tmp_path: Path) -> None:
    lines = [{"step": 1, "step_s": 1.0, "loss": 2.0}, {"step": 2, "step_s": 1.0, "loss": math.nan}]
    summary = summarize(folder_of(tmp_path / "run", lines))
    assert summary["loss"] is None
    assert json.loads(json.dumps(summary, allow_nan=False)) == summary


def test_a_logged_number_cannot_take_the_name_of_a_measured_one(tmp_path: Path) -> None:
    lines = [{"step": 1, "step_s": 2.0, "values": {"seconds": 99.0, "steps": 99.0}}]
    assert summarize(folder_of(tmp_path / "run", lines)) == {"processes": 1, "steps": 1, "seconds": 2.0}
