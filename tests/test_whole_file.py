"""A file that is written is complete or absent; what is no file is written to and stays what it is."""

import os
import stat
import threading

import pytest
import torch

import tulle
from tulle.errors import CheckpointError
from tulle.whole_file import write_whole


def test_what_is_no_file_stays_what_it_is(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()), daemon=True)
    reader.start()
    write_whole(pipe, "all of it")
    reader.join(10)
    assert read == ["all of it"]
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]


def test_a_link_stays_and_what_it_leads_to_is_written(tmp_path):
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("before")
    link.symlink_to(target)
    write_whole(link, "after")
    assert link.is_symlink()
    assert target.read_text() == "after"


def test_a_folder_is_refused_and_nothing_is_left(tmp_path):
    with pytest.raises(IsADirectoryError):
        write_whole(tmp_path, "text")
    assert not list(tmp_path.iterdir())


def test_safetensors_do_not_take_the_place_of_what_is_no_file(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(CheckpointError, match="it is there, and is no file"):
        tulle.save_safetensors(pipe, torch.nn.Linear(2, 1))
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]
    assert stat.S_ISFIFO(pipe.stat().st_mode)
