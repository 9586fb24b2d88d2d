"""The command line is split where a newcomer and a user of torchrun both expect it."""

import pytest

from tulle.cli.options import HelpAsked, split
from tulle.cli.usage import UsageError

OWN = {"--processes": True, "-n": True, "--json": False, "--run-dir": True}


def test_own_options_are_found_before_and_between_those_of_torchrun():
    parts = split(["--json", "--max-restarts", "3", "-n", "2", "--rdzv-backend=c10d", "train.py", "--lr", "1"], OWN)
    assert parts.ours == ["--json", "-n", "2"]
    assert (parts.torchrun.max_restarts, parts.torchrun.rdzv_backend) == (3, "c10d")
    assert parts.torchrun.training_script == "train.py"
    assert parts.torchrun.training_script_args == ["--lr", "1"]


@pytest.mark.parametrize("words", [["--json"], ["--help"], ["-n", "9"], ["--max-restarts", "5"], ["--", "-m"], ["-h"]])
def test_all_that_follows_the_script_is_the_scripts(words):
    parts = split(["-n", "2", "train.py", *words], OWN)
    assert parts.torchrun.training_script_args == words
    assert parts.ours == ["-n", "2"]
    assert parts.torchrun.max_restarts == 0


def test_a_value_that_looks_like_a_script_stays_with_its_option():
    parts = split(["--run-dir", "a.py", "--role", "b.py", "c.py"], OWN)
    assert parts.ours == ["--run-dir", "a.py"]
    assert (parts.torchrun.role, parts.torchrun.training_script) == ("b.py", "c.py")


def test_a_value_can_be_joined_with_an_equals_sign():
    assert split(["--run-dir=here", "train.py"], OWN).ours == ["--run-dir", "here"]


def test_a_module_works_as_in_torchrun():
    parts = split(["-m", "--json", "package.train", "--json"], OWN)
    assert parts.torchrun.module
    assert parts.torchrun.training_script == "package.train"
    assert (parts.ours, parts.torchrun.training_script_args) == (["--json"], ["--json"])


def test_only_options_on_the_command_line_count_as_given():
    assert split(["--nnodes", "1:1", "train.py"], OWN).given & {"nnodes", "node_rank"} == {"nnodes"}


@pytest.mark.parametrize("words", [["--help"], ["-h"], ["-n", "2", "--help", "train.py"]])
def test_help_before_the_script_is_ours(words):
    with pytest.raises(HelpAsked):
        split(words, OWN)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "no script was given"),
        (["--bogus", "train.py"], "unrecognized arguments: --bogus"),
        (["--max-restarts", "many", "train.py"], "invalid int value: 'many'"),
        (["--tee", "3", "train.py"], "--tee: tulle keeps what every rank writes in logs/ of the run folder"),
        (["-r", "3", "train.py"], "--redirects: tulle keeps"),
    ],
)
def test_what_cannot_be_carried_out_is_refused(words, message):
    with pytest.raises(UsageError, match=message):
        split(words, OWN)
