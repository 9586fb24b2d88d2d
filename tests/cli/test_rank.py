"""A script on a rank runs as it would alone, and leaves word if it fails."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import tulle.cli.rank
from tulle.cli.rank import last_step

BOOTSTRAP = tulle.cli.rank.__file__


@pytest.fixture
def run(tmp_path):
    """Run the bootstrap on words in a folder, with its output in `log`, and return the exit code."""

    def start(*words, bootstrap=BOOTSTRAP):
        environment = {**os.environ, "RANK": "1", "TULLE_RUN_DIR": str(tmp_path)}
        with (tmp_path / "log").open("wb") as log:
            command = [sys.executable, "-u", bootstrap, *words]
            return subprocess.run(command, env=environment, stdout=log, cwd=tmp_path, check=False).returncode

    return start


def write(path, text):
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)


SHOW = "import sys, helper; print(__name__, __file__, sys.argv, sys.path[0])"


def test_a_script_sees_itself_as_python_would_show_it(run, tmp_path):
    write(tmp_path / "folder" / "train.py", SHOW)
    write(tmp_path / "folder" / "helper.py", "")
    assert run("script", "folder/train.py", "--help", "x") == 0
    ours = (tmp_path / "log").read_text()
    alone = subprocess.check_output([sys.executable, "folder/train.py", "--help", "x"], cwd=tmp_path, text=True)
    # Python makes __file__ absolute where it was relative only from 3.14 on; both name the same file.
    assert ours.replace(str(tmp_path) + "/", "") == alone.replace(str(tmp_path) + "/", "")


def test_a_module_sees_itself_as_python_would_show_it(run, tmp_path):
    write(tmp_path / "package" / "train.py", SHOW.replace(", helper", ""))
    assert run("module", "package.train", "--json") == 0
    alone = subprocess.check_output([sys.executable, "-m", "package.train", "--json"], cwd=tmp_path, text=True)
    assert (tmp_path / "log").read_text() == alone


def test_another_program_takes_the_place_of_the_bootstrap(run, tmp_path):
    assert run("program", "sh", "-c", "echo $RANK; echo two >&2; exit 4") == 4
    assert (tmp_path / "log").read_text() == "1\ntwo\n"


def word(tmp_path):
    return json.loads((tmp_path / "failure-rank-1.json").read_text())


def test_an_exception_leaves_word_and_the_traceback_begins_in_the_script(run, tmp_path):
    write(tmp_path / "train.py", "print('going')\ndef f():\n    raise ValueError('bad batch')\nf()\n")
    (tmp_path / "rank-1.jsonl").write_text(f'{{"kind": "step", "step": 7, "at": {time.time() + 60}}}\n{{"kind": "st')
    assert run("script", "train.py") == 1
    left, log = word(tmp_path), (tmp_path / "log").read_text()
    assert (left["rank"], left["step"], left["error"]) == (1, 7, "ValueError: bad batch")
    assert log == "going\n" + left["traceback"]
    assert log[: left["log_bytes"]] == "going\n"
    assert "rank.py" not in log
    assert "runpy" not in log


def test_both_streams_come_in_the_order_in_which_they_were_written(run, tmp_path):
    write(tmp_path / "train.py", "import sys\nfor i in range(3):\n  print(i)\n  print('e', i, file=sys.stderr)\n")
    assert run("script", "train.py") == 0
    assert (tmp_path / "log").read_text().split("\n") == ["0", "e 0", "1", "e 1", "2", "e 2", ""]


@pytest.mark.parametrize(
    ("code", "exit_code", "error"),
    [("3", 3, "exit code 3"), ("'no data'", 1, "exit: no data"), ("0", 0, None), ("None", 0, None)],
)
def test_an_exit_leaves_word_unless_it_says_all_is_well(run, tmp_path, code, exit_code, error):
    write(tmp_path / "train.py", f"import sys; sys.exit({code})")
    assert run("script", "train.py") == exit_code
    found = word(tmp_path) if (tmp_path / "failure-rank-1.json").exists() else {"error": None}
    assert found["error"] == error


def test_word_of_an_earlier_attempt_is_taken_back(run, tmp_path):
    (tmp_path / "failure-rank-1.json").write_text("{}")
    write(tmp_path / "train.py", "")
    assert run("script", "train.py") == 0
    assert not (tmp_path / "failure-rank-1.json").exists()


def test_the_bootstrap_needs_nothing_but_the_standard_library(run, tmp_path):
    write(tmp_path / "train.py", "import sys; print([m for m in sys.modules if m.split('.')[0] in ('tulle', 'torch')])")
    assert run("script", "train.py") == 0
    assert (tmp_path / "log").read_text() == "[]\n"


@pytest.mark.parametrize(
    ("records", "step"),
    [
        ('{"step": 7, "at": 50}\n{"step": 8, "at": 51}\n', 8),
        ('{"step": 7, "at": 50}\n{"step": 8, "a', 7),
        ('{"step": 7, "at": 49.9}\n', None),  # of an earlier run in the same folder
        ('{"kind": "text"}\n', None),
        ("", None),
    ],
)
def test_the_last_step_is_that_of_this_run(tmp_path, records, step):
    (tmp_path / "records").write_text(records)
    assert last_step(tmp_path / "records", since_s=50.0) == step


def test_without_records_there_is_no_last_step(tmp_path):
    assert last_step(tmp_path / "none.jsonl", since_s=0.0) is None


@pytest.mark.parametrize("code", [0, 3])
def test_what_a_script_does_at_its_exit_may_take_its_time_if_it_went_well(code, run, tmp_path):
    text = Path(BOOTSTRAP).read_text()
    hasty = tmp_path / "hasty.py"
    hasty.write_text(text.replace("_EXIT_WITHIN_S = 10.0", "_EXIT_WITHIN_S = 0.1"))
    assert hasty.read_text() != text
    late = "import atexit, sys, time\natexit.register(lambda: (time.sleep(0.5), print('saved')))\n"
    write(tmp_path / "train.py", f"{late}sys.exit({code})\n")
    assert run("script", "train.py", bootstrap=hasty) == (1 if code else 0)
    assert (tmp_path / "log").read_text() == ("" if code else "saved\n")
