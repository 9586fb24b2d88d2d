"""The commands explain themselves, and refuse what they cannot do before anything is started."""

import io
import json
import os
import subprocess
import sys

import pytest

import tulle
from tulle.cli import main
from tulle.cli.console import console


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TERMINAL_WIDTH", "200")
    monkeypatch.setenv("NO_COLOR", "1")


@pytest.mark.parametrize(
    ("command", "example"),
    [
        ([], "tulle run --processes 4 train.py"),
        (["run"], "tulle run --processes 4 train.py --epochs 3"),
        (["profile"], "tulle profile --processes 4 train.py --epochs 3"),
        (["report"], "tulle report runs/demo --compare runs/one-process"),
        (["doctor"], "tulle doctor --processes 4"),
    ],
)
def test_help_has_an_example_and_the_exit_codes(command, example, capsys):
    assert main([*command, "--help"]) == 0
    text = capsys.readouterr().out
    assert example in text
    assert (
        "Exit codes: 0 all went well, 1 it failed, 2 the command line is wrong, 130 by Ctrl-C, 143 by SIGTERM." in text
    )


@pytest.mark.parametrize("command", ["run", "report", "doctor", "profile", "plan", "explain", "simulate"])
def test_help_names_each_option_whole_on_a_narrow_screen(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main([command, "--help"]) == 0
    assert "…" not in capsys.readouterr().out


def test_help_of_run_tells_of_torchrun(capsys):
    assert main(["run", "--help"]) == 0
    text = capsys.readouterr().out
    assert "[TORCHRUN OPTIONS] SCRIPT [ARGUMENTS]..." in text
    for option in ("--processes", "--hosts", "--run-dir", "--timeline", "--compare", "--check-finite", "--json"):
        assert option in text


def test_the_version_is_that_of_the_package(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"tulle {tulle.__version__}\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "no-such.py"], "the script no-such.py is not there"),
        (["run", "."], ". is a folder without a __main__.py, expected a script"),
        (["run", "-m", "no_such.module"], "there is no module 'no_such'"),
        (["run"], "no script was given, expected tulle run [OPTIONS] SCRIPT [ARGUMENTS]..."),
        (["profile"], "no script was given, expected tulle profile [OPTIONS] SCRIPT [ARGUMENTS]..."),
        (
            ["explain", "--json"],
            "no plan or script was given, expected tulle explain [OPTIONS] PLAN|SCRIPT [ARGUMENTS]...",
        ),
        (["profile", "no-such.py"], "the script no-such.py is not there"),
        (["profile", "--epochs", "3", "SCRIPT"], "tulle profile --help and torchrun --help have the options"),
        (["run", "--processes", "none", "SCRIPT"], "--processes is 'none', expected a number from 1 up, or auto"),
        (["run", "--hosts", "one.invalid,two.invalid", "SCRIPT"], "say which it is with --node-rank, from 0 to 1"),
        (["run", "--hosts", "a,b", "--node-rank", "0", "SCRIPT"], "with several hosts give --run-dir"),
        (["run", "--nnodes", "some", "SCRIPT"], "--nnodes is 'some', expected a number or a range such as 1:4"),
        (["run", "--run-dir", "SCRIPT", "SCRIPT"], "is a file, expected a folder"),
        (["run", "--compare", "no-such-run", "SCRIPT"], "--compare no-such-run is not there"),
        (
            ["run", "-m", "./train.py"],
            "-m ./train.py is a path, expected a module's name, package.module: leave -m out",
        ),
        (["run", "--hosts", "", "SCRIPT"], "--hosts '' has an empty name"),
        (["run", "--processes", "", "SCRIPT"], "--processes is '', expected a number from 1 up, or auto"),
        (["run", "--run-dir"], "argument --run-dir: expected one argument"),
        (["doctor", "train.py"], "'train.py' is too much: the command takes options only"),
        (["doctor", "--hosts", ""], "--hosts '' has an empty name"),
        (["doctor", "--hosts"], "argument --hosts: expected one argument: tulle doctor --help"),
    ],
)
def test_what_cannot_be_done_is_refused_with_code_2_and_leaves_nothing(words, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train").write_text("")
    assert main([word.replace("SCRIPT", "train") for word in words]) == 2
    output = capsys.readouterr()
    assert message in output.err
    assert output.err.endswith(f"See tulle {words[0]} --help.\n")
    assert output.out == ""
    assert [path.name for path in tmp_path.iterdir()] == ["train"]


def test_an_unknown_command_is_refused(capsys):
    assert main(["trian"]) == 2
    assert "no such command 'trian'" in capsys.readouterr().err


def test_a_folder_that_is_no_run_has_no_report(tmp_path, capsys):
    assert main(["report", str(tmp_path)]) == 1
    assert "is not the folder of a run" in capsys.readouterr().err


def test_a_report_is_drawn_where_it_is_asked_for(tmp_path, capsys):
    run = _recorded(tmp_path)
    page = tmp_path / "page.html"
    for option in ("--output", "-o"):
        page.unlink(missing_ok=True)
        assert main(["report", str(run), option, str(page)]) == 0
        assert page.exists()
        assert capsys.readouterr().out.split() == [str(page)]
    assert "<html" in page.read_text()


def test_report_as_json_is_the_summary(tmp_path, capsys):
    run = _recorded(tmp_path)
    assert main(["report", str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 1
    assert not (run / "report.html").exists()


def _recorded(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "rank-0.jsonl").write_text('{"kind": "step", "step": 1, "at": 1.0, "step_s": 0.5, "loss": 2.0}\n')
    return run


def test_without_its_packages_the_command_says_how_to_get_them(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "typer", None)
    assert main(["--help"]) == 2
    assert capsys.readouterr().err == 'The command needs two more packages: pip install "tulle[cli]"\n'


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["plan", "profile.json", "--hosts", "0"], "tulle: invalid value for '--hosts': "),
        (["report"], "tulle: missing argument 'RUN'\nSee tulle report --help.\n"),
        (["plam"], "tulle: no such command 'plam'"),
    ],
)
def test_a_command_line_that_does_not_parse_is_told_in_a_line(arguments, said, capsys):
    assert main(arguments) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith(said)
    assert shown.err.count("\n") == 2
    assert not shown.out


def test_a_notebook_is_refused_with_what_makes_a_script_of_it(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.ipynb").write_text("{}")
    assert main(["run", "train.ipynb"]) == 2
    assert "jupyter nbconvert --to script train.ipynb" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["train.ipynb"]


def test_a_sign_that_the_output_lacks_ends_no_command(monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    assert main(["--version"]) == 0
    print("12 µs ✓", flush=True)
    assert written.getvalue().endswith(b"12 ?s ?\n")


def test_a_pipe_does_not_cut_numbers(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert console().width > 200
    monkeypatch.setenv("COLUMNS", "70")
    assert console().width == 70


def told_version(stdout, **environment):
    """Exit code and errors of `tulle --version`, whose output goes there."""
    command, surroundings = [sys.executable, "-m", "tulle", "--version"], os.environ | environment
    ended = subprocess.run(
        command, check=False, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=60, env=surroundings
    )
    return ended.returncode, ended.stderr


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a device of Linux")
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_that_finds_no_room_is_told_in_a_line(unbuffered):
    told = "tulle: what it says or saves cannot be written: No space left on device\n"
    with open("/dev/full", "w") as full:
        assert told_version(full, PYTHONUNBUFFERED=unbuffered) == (1, told)


def test_output_that_nobody_reads_ends_in_silence():
    reading, writing = os.pipe()
    os.close(reading)
    assert told_version(writing) == (1, "")
    os.close(writing)
