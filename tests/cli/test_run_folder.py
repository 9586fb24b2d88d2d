"""A run's folder: of its own unless it was named, and nothing of an earlier run in it is taken for this one's."""

import pytest

from tulle.cli.folder import Description, RunFolder, made_free


@pytest.fixture
def start(tmp_path):
    """Prepare a run of some ranks in the folder, as torchrun asks for it."""

    def prepare(ranks, **settings):
        folder = RunFolder(tmp_path, Description(["train.py"], ["localhost"], settings))
        folder.reify({rank: {"RANK": str(rank), "WORLD_SIZE": str(ranks)} for rank in range(ranks)})

    return prepare


def test_runs_that_begin_in_the_same_second_have_folders_of_their_own(tmp_path):
    path = tmp_path / "runs" / "train-20260101-120000"
    assert [made_free(path).name for _ in range(3)] == [path.name, f"{path.name}-2", f"{path.name}-3"]


def test_a_folder_that_cannot_be_made_is_an_error_at_once(tmp_path):
    (tmp_path / "runs").write_text("")
    with pytest.raises(OSError, match="runs"):
        made_free(tmp_path / "runs" / "train-20260101-120000")


def test_records_and_timelines_of_an_earlier_run_are_not_this_ones(tmp_path, start):
    names = ["rank-0.jsonl", "rank-3.jsonl", "timeline-rank-0.json", "timeline-rank-3.json", "rank-x.jsonl"]
    for name in names:
        (tmp_path / name).write_text("earlier\n")
    start(2)
    left = {path.name for path in tmp_path.iterdir()} - {"logs", "run.json"}
    assert left == {"previous-rank-0.jsonl", "previous-rank-3.jsonl", "rank-x.jsonl"}


def test_a_run_that_recorded_nothing_does_not_replace_the_record_of_the_one_before(tmp_path, start):
    (tmp_path / "rank-0.jsonl").write_text("steps of the first run\n")
    start(1)
    (tmp_path / "rank-0.jsonl").write_text("")  # of a second one, which fell before its first step
    start(1)
    assert (tmp_path / "previous-rank-0.jsonl").read_text() == "steps of the first run\n"


def test_mesh_and_plan_of_an_earlier_run_are_not_this_ones_unless_it_is_to_follow_that_plan(tmp_path, start):
    for settings in ({}, {"TULLE_PLAN": str(tmp_path / "plan.json")}):
        for name in ("mesh.json", "plan.json"):
            (tmp_path / name).write_text("earlier\n")
        start(1, **settings)
        assert not (tmp_path / "mesh.json").exists()
        assert (tmp_path / "plan.json").exists() == bool(settings)
        assert (tmp_path / "previous-plan.json").read_text() == "earlier\n"
