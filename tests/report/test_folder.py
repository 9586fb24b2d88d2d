"""Reading a run's folder: what is tolerated, and what is refused with which text."""

import math
from pathlib import Path

import numpy as np
import pytest
from fake_run import Fake, fail, make_run, write_json, write_lines

from tulle.errors import DataError
from tulle.report import read


def test_a_whole_run_is_read(tmp_path: Path) -> None:
    run = read(make_run(tmp_path / "run", Fake(ranks=2, steps=120)))
    assert run.processes == 2
    assert run.launch.command == ("examples/01_translate.py", "--steps", "120")
    assert run.launch.versions == {"tulle": "0.1.0", "torch": "2.13.0", "python": "3.11.7"}
    assert run.mesh is not None
    assert run.mesh.axes == {"data": 2}
    assert run.mesh.network["data"].latency_s == 0.00031
    assert run.plan is not None
    assert [table.scheme for table in run.plan.tables] == ["allgather", "densify"]
    assert [log.rank for log in run.ranks] == [0, 1]
    assert run.ranks[1].steps.tolist() == list(range(1, 121))
    assert run.ranks[0].traffic["dense gradients", "all_reduce"][7] == 7_340_032
    assert [text.step for text in run.ranks[0].texts] == [100]


def test_ranks_are_in_numeric_order(tmp_path: Path) -> None:
    run = read(make_run(tmp_path / "run", Fake(ranks=12, steps=1)))
    assert [log.rank for log in run.ranks] == list(range(12))


@pytest.mark.parametrize("cut", [1, 20, 200])
def test_a_torn_last_line_is_skipped_and_counted(tmp_path: Path, cut: int) -> None:
    folder = make_run(tmp_path / "run", Fake(ranks=1, steps=5, texts=False))
    log = folder / "rank-0.jsonl"
    lines = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(b"".join(lines[:4]) + lines[4][:cut])
    rank = read(folder).ranks[0]
    assert rank.steps.tolist() == [1, 2, 3, 4]
    assert rank.torn_lines == 1


@pytest.mark.parametrize("ends", [b"", b"\n"])
def test_zeros_that_a_fallen_machine_has_left_are_a_torn_line(tmp_path: Path, ends: bytes) -> None:
    folder = make_run(tmp_path / "run", Fake(ranks=1, steps=3, texts=False))
    log = folder / "rank-0.jsonl"
    lines = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(b"".join([*lines[:2], bytes(300), ends, lines[2]]))
    rank = read(folder).ranks[0]
    assert rank.steps.tolist() == [1, 2, 3]
    assert rank.torn_lines == 1


def test_a_resumed_run_may_write_behind_a_torn_line(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", Fake(ranks=1, steps=3, texts=False))
    log = folder / "rank-0.jsonl"
    lines = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(lines[0] + lines[1][:40] + lines[1] + lines[2])
    rank = read(folder).ranks[0]
    assert rank.steps.tolist() == [1, 2, 3]
    assert rank.torn_lines == 1


def test_after_a_resume_the_later_record_of_a_step_counts(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    recorded = [(1, 9.0), (2, 8.0), (3, 7.0), (4, 6.0), (2, 5.0), (3, 4.0)]
    write_lines(folder / "rank-0.jsonl", [{"kind": "step", "step": step, "loss": loss} for step, loss in recorded])
    rank = read(folder).ranks[0]
    assert rank.steps.tolist() == [1, 2, 3], "step 4 was undone by the resume, and not trained again"
    assert rank.loss.tolist() == [9.0, 5.0, 4.0]


def test_texts_that_a_resume_undid_do_not_count(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    steps = [{"kind": "step", "step": step} for step in (1, 2)]
    texts = [{"kind": "text", "step": step, "name": "samples", "text": f"first {step}"} for step in (1, 2)]
    write_lines(folder / "rank-0.jsonl", [steps[0], texts[0], steps[1], texts[1], steps[1]])
    assert [text.text for text in read(folder).ranks[0].texts] == ["first 1"]


def test_numbers_logged_apart_from_a_step_join_it(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    steps = [{"kind": "step", "step": step, "loss": 1.0, "values": {"valid_loss": 2.0}} for step in (1, 2)]
    apart = [{"kind": "values", "step": step, "values": {"bleu": 10.0 * step}} for step in (2, 5)]
    write_lines(folder / "rank-0.jsonl", steps + apart)
    rank = read(folder).ranks[0]
    assert rank.steps.tolist() == [1, 2, 5]
    np.testing.assert_array_equal(rank.loss, [1.0, 1.0, math.nan])
    np.testing.assert_array_equal(rank.values["valid_loss"], [2.0, 2.0, math.nan])
    np.testing.assert_array_equal(rank.values["bleu"], [math.nan, 20.0, 50.0])


def test_numbers_of_before_the_first_step_stay(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    before = [
        {"kind": kind, "step": 1, "name": "bleu", "text": "0", "values": {"bleu": 0.5}} for kind in ("values", "text")
    ]
    write_lines(folder / "rank-0.jsonl", [*before, *({"kind": "step", "step": step, "loss": 1.0} for step in (1, 2))])
    rank = read(folder).ranks[0]
    np.testing.assert_array_equal(rank.values["bleu"], [0.5, math.nan])
    assert [text.text for text in rank.texts] == ["0"]


def test_a_missing_number_is_nan_and_a_diverged_loss_is_infinite(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    lines = [{"kind": "step", "step": 1}, {"kind": "step", "step": 2, "loss": math.nan}]
    write_lines(folder / "rank-0.jsonl", lines)
    rank = read(folder).ranks[0]
    np.testing.assert_array_equal(rank.loss, [math.nan, math.inf])
    np.testing.assert_array_equal(rank.tokens, [math.nan, math.nan])


def test_failures_are_in_the_order_of_time(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", Fake(ranks=3, steps=1))
    fail(folder, 0, at=20.0)
    fail(folder, 2, at=10.0)
    assert [failure.rank for failure in read(folder).failures] == [2, 0]


def test_a_run_that_ended_before_its_first_step_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    write_json(folder / "run.json", {"command": ["train.py"], "processes": 2})
    (folder / "rank-0.jsonl").touch()
    run = read(folder)
    assert run.processes == 2
    assert run.mesh is None
    assert run.plan is None
    assert len(run.ranks[0].steps) == 0


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"nowhere is not there, but a report needs the folder of a run.*Give the folder"
    ):
        read(tmp_path / "nowhere")


def test_a_file_in_place_of_a_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "report.html").touch()
    with pytest.raises(DataError, match=r"report\.html is a file, but a report needs the folder of a run"):
        read(tmp_path / "report.html")


def test_an_empty_folder_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"holds nothing, but neither run\.json nor rank-0\.jsonl\. Give the folder"):
        read(tmp_path)


def test_another_folder_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    with pytest.raises(DataError, match=r"holds notes\.txt, but neither run\.json"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("run.json", '{"processes": 4', r"run\.json is broken: expected one JSON object.*Delete the file"),
        ("run.json", "[1, 2]", r"run\.json is broken: expected one JSON object"),
        ("run.json", '{"started": "yesterday"}', r"run\.json is broken.*yesterday"),
        ("mesh.json", '{"axes": {"data": 4}}', r"mesh\.json has no 'backend'.*Run again"),
        ("plan.json", '{"tables": [{"name": "a"}]}', r"plan\.json has no 'rows'"),
        ("rank-0.jsonl", "step 1 done\n", r"line 1 of .*rank-0\.jsonl is not JSON.*'step 1 done'\. Delete the line"),
        (
            "rank-0.jsonl",
            '{"kind": "step"}\n',
            r"line 1 of .*rank-0\.jsonl is not a record of a step: it has no 'step'",
        ),
        ("rank-0.jsonl", '{"kind": "step", "step": 1, "loss": "low"}\n', r"line 1 of .* is not a record of a step"),
        ("failure-rank-1.json", "{}", r"failure-rank-1\.json has no 'rank'"),
    ],
)
def test_a_broken_file_is_named_with_the_mend(tmp_path: Path, name: str, content: str, text: str) -> None:
    folder = make_run(tmp_path / "run", Fake(ranks=1, steps=2))
    (folder / name).write_text(content)
    with pytest.raises(DataError, match=text):
        read(folder)


def test_a_file_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", Fake(ranks=1, steps=2))
    (folder / "run.json").write_bytes(b'{"command": ["\xff"]}')
    with pytest.raises(DataError, match=r"run\.json is broken.*utf-8"):
        read(folder)


def test_numbers_that_a_resume_undid_are_gone(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    sent = {"words": {"scheme": "ring", "bytes_sent": 7, "messages": 1, "rows": 3}}
    step = {"kind": "step", "values": {"bleu": 1.0}, "traffic": sent}
    write_lines(folder / "rank-0.jsonl", [{"kind": "step", "step": 1}, step | {"step": 2}, {"kind": "step", "step": 2}])
    rank = read(folder).ranks[0]
    np.testing.assert_array_equal(rank.values.get("bleu", [math.nan, math.nan]), [math.nan, math.nan])
    assert not any(column.any() for column in (*rank.traffic.values(), *rank.traffic_messages.values()))
    assert np.isnan(list(rank.rows.values())).all()
