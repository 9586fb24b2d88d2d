"""A growing file is read on, line by line, and never twice."""

import pytest

from tulle.cli.tail import Tail


@pytest.fixture
def path(tmp_path):
    return tmp_path / "growing"


def append(path, text):
    with path.open("ab") as file:
        file.write(text)


def test_a_file_that_is_not_there_yet_has_no_lines(path):
    tail = Tail(path)
    assert tail.read() == []
    append(path, b"first\n")
    assert tail.read() == ["first"]


def test_each_line_comes_once(path):
    tail = Tail(path)
    append(path, b"one\ntwo\n")
    assert tail.read() == ["one", "two"]
    assert tail.read() == []
    append(path, b"three\n")
    assert tail.read() == ["three"]


def test_a_torn_line_waits_for_its_end(path):
    tail = Tail(path)
    append(path, "grü".encode()[:-1])
    assert tail.read() == []
    append(path, "grün\n".encode()[3:])
    assert tail.read() == ["grün"]
    assert tail.rest() == []


def test_the_rest_is_a_last_line_without_end(path):
    tail = Tail(path)
    append(path, b"one\ntw")
    assert tail.read() == ["one"]
    assert tail.rest() == ["tw"]


def test_what_was_there_before_can_be_skipped(path):
    append(path, b"old\n")
    tail = Tail(path, skip=True)
    append(path, b"new\n")
    assert tail.read() == ["new"]


def test_it_stops_at_the_limit_for_good(path):
    limits = iter([None, None, 8, 8, 8, 8])
    tail = Tail(path, limit=lambda: next(limits))
    append(path, b"one\n")
    assert tail.read() == ["one"]
    append(path, b"two\nTraceback\n")
    assert tail.read() == ["two"]
    append(path, b"more\n")
    assert tail.read() == []


def test_a_file_that_takes_its_place_is_read_from_its_begin(path):
    append(path, b"of an earlier run, long\nand torn")
    tail = Tail(path, skip=True)
    path.rename(path.with_name("previous"))
    append(path, b"new\n")
    assert tail.read() == ["new"]
    append(path, b"newer\n")
    assert tail.read() == ["newer"]


def test_of_a_progress_bar_the_latest_state_is_kept(path):
    tail = Tail(path)
    for percent in range(100):
        append(path, b"\r%3d%%" % percent)
        assert tail.read() == []
    assert tail.rest() == [" 99%"]
    append(path, b"\rdone\r")
    assert tail.read() == []
    append(path, b"\nnext\n")
    assert tail.read() == ["done\r", "next"]
