"""The rank that failed first is shown first, and the others say why they followed."""

import json

import pytest

from tulle.cli.failures import Cause, collect, describe, forget_interrupted, last_lines, signal_name
from tulle.cli.launch import Ending


def leave_word(run, rank, at, error):
    trace = "Traceback (most recent call last):\n  ...\n"
    word = {"rank": rank, "step": None, "at": at, "error": error, "traceback": trace, "log_bytes": 0}
    (run / f"failure-rank-{rank}.json").write_text(json.dumps(word))


GONE = (
    "RuntimeError: [/pytorch/gloo/pair.cc:553] Connection closed by peer [10.0.0.1]:4736. "
    "This is typically caused by a remote worker crashing."
)


def test_the_earliest_error_comes_first(tmp_path):
    leave_word(tmp_path, 0, 12.0, "ValueError: later")
    leave_word(tmp_path, 1, 11.0, "KeyError: 'earlier'")
    assert [failure.rank for failure in collect(tmp_path, {}, since_s=5.0)] == [1, 0]


def test_an_error_of_its_own_explains_a_peer_that_had_gone_even_if_it_was_written_later(tmp_path):
    leave_word(tmp_path, 0, 11.0, GONE)
    leave_word(tmp_path, 1, 12.0, "ValueError: bad batch")
    assert [failure.rank for failure in collect(tmp_path, {}, since_s=5.0)] == [1, 0]


def test_a_rank_that_was_killed_explains_the_peers_that_lost_it(tmp_path):
    leave_word(tmp_path, 0, 11.0, GONE)
    endings = {0: Ending(1, 12.0), 1: Ending(-15, 12.0), 2: Ending(-9, 12.0)}
    failed = collect(tmp_path, endings, since_s=5.0)
    assert [(failure.rank, failure.cause) for failure in failed] == [
        (2, Cause.OWN),
        (0, Cause.PEER_GONE),
        (1, Cause.ENDED),
    ]
    assert describe(failed, {}).splitlines() == [
        "rank 2 was killed by signal 9 (SIGKILL); out of memory is the usual reason (see dmesg)",
        "",
        "rank 0 fell because a peer had gone: RuntimeError: Connection closed by peer [10.0.0.1]:4736.",
        "rank 1 was ended by the launcher, because rank 2 had failed",
    ]


def test_a_peer_that_ended_without_an_error_is_told_of_as_ranks_take_as_many_steps(tmp_path):
    leave_word(tmp_path, 1, 11.0, GONE)
    logs = {rank: tmp_path / f"rank-{rank}.log" for rank in range(3)}
    told = describe(collect(tmp_path, {}, since_s=5.0), logs).splitlines()[-1]
    assert told.startswith("ranks 0, 2 ended without an error: every rank must take as many steps")


def test_the_first_failure_is_told_in_full_and_the_same_error_elsewhere_in_a_line(tmp_path):
    leave_word(tmp_path, 1, 11.0, "ValueError: bad\nbatch")
    leave_word(tmp_path, 0, 12.0, "ValueError: bad\nbatch")
    leave_word(tmp_path, 2, 13.0, "TypeError: another")
    (tmp_path / "rank-1.jsonl").write_text('{"kind": "step", "step": 6, "at": 10.0}\n')
    assert describe(collect(tmp_path, {}, since_s=5.0), {}).splitlines() == [
        "rank 1 failed first, after step 6: ValueError: bad batch",
        "",
        "Traceback (most recent call last):",
        "  ...",
        "",
        "rank 0 failed with the same error",
        "rank 2 failed too: TypeError: another",
    ]


def test_without_a_traceback_the_end_of_the_log_is_told(tmp_path):
    log = tmp_path / "rank-0.log"
    log.write_text("".join(f"line {number}\n" for number in range(100)))
    lines = describe(collect(tmp_path, {0: Ending(3, 1.0)}, since_s=5.0), {0: log}).splitlines()
    assert lines[0] == "rank 0 failed first: exit code 3"
    assert lines[2:4] == ["The last lines that rank 0 wrote:", "  line 80"]
    assert "  line 99" in lines


def test_a_word_that_was_torn_leaves_what_the_launcher_saw(tmp_path):
    (tmp_path / "failure-rank-0.json").write_text('{"rank": 0, "at"')
    assert [failure.error for failure in collect(tmp_path, {0: Ending(1, 1.0)}, since_s=5.0)] == ["exit code 1"]


def test_a_log_that_is_not_there_has_no_last_lines(tmp_path):
    assert last_lines(tmp_path / "none.log") == []


@pytest.mark.parametrize(("number", "name"), [(11, "11 (SIGSEGV)"), (63, "63"), (15, "15 (SIGTERM)")])
def test_a_signal_has_its_name(number, name):
    assert signal_name(number) == name


def test_of_a_progress_bar_only_the_last_state_is_told(tmp_path):
    log = tmp_path / "rank-0.log"
    log.write_bytes(b"reads\r\n\n" + b"".join(b"\r%d%%" % percent for percent in range(50)) + b"\nends")
    assert last_lines(log) == ["reads", "", "49%", "ends"]


def test_an_interrupt_is_no_failure_to_report(tmp_path):
    leave_word(tmp_path, 0, 11.0, "KeyboardInterrupt: ")
    leave_word(tmp_path, 1, 11.0, GONE)
    leave_word(tmp_path, 2, 10.0, "ValueError: bad batch")
    forget_interrupted(tmp_path)
    assert [failure.rank for failure in collect(tmp_path, {}, since_s=5.0)] == [2]
