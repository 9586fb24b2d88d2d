"""A checkpoint's folder is complete or absent, whenever its writing is interrupted, and replaces no other."""

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import tulle
import tulle.whole_folder
from checkpoints import contents, fails_halfway, good_checkpoint, trained
from ranks import on_ranks
from tulle.comm import barrier
from tulle.errors import CheckpointError


@pytest.fixture
def checkpoint(tmp_path: Path) -> Iterator[Path]:
    with good_checkpoint(tmp_path) as path:
        yield path


def test_the_folders_above_a_checkpoint_are_made(tmp_path):
    tulle.save(tmp_path / "new" / "folder" / "a", *trained())
    assert os.listdir(tmp_path / "new" / "folder") == ["a"]
    assert sorted(contents(tmp_path / "new" / "folder" / "a")) == [".metadata", "__0_0.distcp", "run.pt"]


@on_ranks(3)
def test_a_plain_model_that_all_ranks_save_at_once_is_whole(tmp_path):
    mesh = tulle.init(data=-1)
    model, optimizer = trained()
    for step in range(12):
        barrier(mesh["data"])
        tulle.save(tmp_path / "a", model, optimizer, step=step)
    barrier(mesh["data"])
    tulle.save(tmp_path / "a", model, optimizer, asynchronous=True, step=12).result()
    barrier(mesh["data"])
    assert tulle.load(tmp_path / "a", model, optimizer) == {"step": 12}
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("unexpected pos 64 vs 0")])
def test_a_write_that_fails_leaves_the_old_file_and_nothing_beside(error, checkpoint, monkeypatch):
    before = contents(checkpoint)
    model, optimizers = trained(seed=1)
    monkeypatch.setattr(torch, "save", fails_halfway(error))
    text = f"cannot write the checkpoint {str(checkpoint)!r}: {error}; an older one of that name is as it was"
    with pytest.raises(CheckpointError, match=re.escape(text)):
        tulle.save(checkpoint, model, optimizers, step=3)
    monkeypatch.undo()
    assert contents(checkpoint) == before
    assert os.listdir(checkpoint.parent) == [checkpoint.name]
    tulle.save(checkpoint, model, optimizers, step=3)
    assert tulle.load(checkpoint, model, optimizers) == {"step": 3}


def test_a_write_that_is_interrupted_leaves_the_old_file(checkpoint, monkeypatch):
    before = contents(checkpoint)
    monkeypatch.setattr(torch, "save", fails_halfway(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        tulle.save(checkpoint, *trained(seed=1))
    monkeypatch.undo()
    assert contents(checkpoint) == before
    tulle.save(checkpoint, *trained(seed=1))  # what was left beside does not disturb the next
    assert os.listdir(checkpoint.parent) == [checkpoint.name]


def test_the_failing_write_of_these_tests_does_leave_half_a_file(checkpoint, monkeypatch):
    run = torch.load(checkpoint / "run.pt")
    monkeypatch.setattr(torch, "save", fails_halfway(OSError()))
    with (checkpoint / "run.pt").open("wb") as file, contextlib.suppress(OSError):
        torch.save(run, file)
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="is damaged, or not a checkpoint"):
        tulle.load(checkpoint, *trained())


@pytest.mark.parametrize("there", ["a file", "a folder"])
def test_what_is_there_and_no_checkpoint_is_not_replaced(there, tmp_path):
    path = tmp_path / "a"
    if there == "a file":
        path.write_text("mine")
    else:
        path.mkdir()
        (path / "mine").touch()
    text = f"{str(path)!r} is there, and is no checkpoint: tulle.save replaces nothing else. Give another name"
    with pytest.raises(CheckpointError, match=re.escape(text)):
        tulle.save(path, *trained())
    assert os.listdir(tmp_path) == ["a"]
    assert path.read_text() == "mine" if path.is_file() else os.listdir(path) == ["mine"]


def test_an_empty_folder_is_taken(tmp_path):
    (tmp_path / "a").mkdir()
    tulle.save(tmp_path / "a", *trained(), step=1)
    assert tulle.load(tmp_path / "a", *trained()) == {"step": 1}


def test_a_link_to_a_checkpoint_stays_and_leads_to_the_new_one(tmp_path):
    model, optimizers = trained()
    tulle.save(tmp_path / "a", model, optimizers, step=1)
    (tmp_path / "latest").symlink_to("a")
    for step in (2, 3):
        tulle.save(tmp_path / "latest", model, optimizers, step=step)
        assert tulle.load(tmp_path / "a", model, optimizers) == {"step": step}
    assert (tmp_path / "latest").is_symlink()
    assert sorted(os.listdir(tmp_path)) == ["a", "latest"]


@pytest.mark.parametrize("instant", ["before the old one is put away", "before the new one has its place"])
def test_where_folders_cannot_change_places_at_once_a_checkpoint_is_there_at_any_instant(
    instant, checkpoint, monkeypatch
):
    """As on a file system that cannot swap: the old one is put away, the new one put in its place."""
    monkeypatch.setattr(tulle.whole_folder, "_swap", lambda *_: False)
    model, optimizers = trained(seed=1)
    tulle.save(checkpoint, model, optimizers, step=3)
    assert tulle.load(checkpoint, model, optimizers) == {"step": 3}
    renames = []

    def rename(path: Path, to: Path) -> None:
        renames.append(to)
        if len(renames) == (1 if instant.startswith("before the old") else 2):
            raise KeyboardInterrupt
        os.rename(path, to)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(KeyboardInterrupt):
        tulle.save(checkpoint, model, optimizers, step=4)
    monkeypatch.undo()
    assert tulle.load(checkpoint, model, optimizers) == {"step": 3}
    tulle.save(checkpoint, model, optimizers, step=5)
    assert tulle.load(checkpoint, model, optimizers) == {"step": 5}
    assert os.listdir(checkpoint.parent) == [checkpoint.name]
