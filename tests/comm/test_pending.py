"""A rank that goes, or stands still, makes the others raise in time, and they say who fell first."""

import _thread
import gc
import re
import sys
import threading
import time
from dataclasses import replace
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import tulle
from ranks import on_ranks
from tulle import board, comm
from tulle.comm.pending import Exchange, translated
from tulle.errors import CommunicationError, DataError, GradientError, MeshError
from tulle.mesh import Axis


def leave_the_team(word: str | None = None) -> None:
    """What the end of a process does to the others: its connections close."""
    if word is not None:
        board.leave_failure(word)
    dist.destroy_process_group()
    gc.collect()


def impatient(axis: Axis, timeout_s: float) -> Axis:
    """The same axis on a group that gives up after `timeout_s`. Every rank must call it."""
    group = dist.new_group(list(axis.ranks), timeout=timedelta(seconds=timeout_s))
    return replace(axis, group=group, timeout_s=timeout_s)


def all_reduce(axis: Axis) -> comm.Pending:
    return comm.all_reduce(torch.zeros(4), axis, label="words")


def all_gather(axis: Axis) -> comm.Pending:
    return comm.all_gather(torch.zeros(4), axis, label="words")


def all_gather_parts(axis: Axis) -> comm.Pending:
    return comm.all_gather_parts(torch.zeros(4), [4] * axis.size, axis, label="words")


def large_parts(axis: Axis) -> comm.Pending:
    return comm.all_gather_parts(torch.zeros(1 << 18), [1 << 18] * axis.size, axis, label="words")


def broadcast(axis: Axis) -> comm.Pending:
    return comm.broadcast(torch.zeros(4), axis, label="words")


CALLS = [all_reduce, all_gather, all_gather_parts, large_parts]


def failure_of(call) -> str:
    """The text of the `CommunicationError` that a collective must raise."""
    axis = tulle.init(data=-1)["data"]
    with pytest.raises(CommunicationError) as failure:
        call(axis).wait()
    return str(failure.value)


@on_ranks(2, 3)
@pytest.mark.parametrize("call", CALLS)
def test_when_a_rank_has_gone_the_others_raise_and_name_it(call):
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    if rank == last:
        tulle.init(data=-1)
        leave_the_team(f"rank {last} failed first with ValueError: the batch is empty")
        return
    comm.traffic.step = 7
    begin_s = time.monotonic()
    text = failure_of(call)
    assert time.monotonic() - begin_s < 10, "it waited for the time-out"
    assert re.match(rf"all-(reduce|gather) of words in step 7 failed on rank {rank} of axis 'data' \(", text)
    assert f": rank {last} failed first with ValueError: the batch is empty. The backend said: " in text
    leave_the_team()  # as a process would that has raised: another may wait for it rather than for the first


@on_ranks(3)
def test_when_ranks_have_left_without_an_error_the_others_say_after_which_step():
    rank = dist.get_rank()
    comm.traffic.ended = 17
    if rank > 0:
        tulle.init(data=-1)
        board.leave_in_peace()
        leave_the_team()
        return
    text = failure_of(all_reduce)
    assert ": rank 1 left after step 17 and rank 2 left after step 17: every rank must take as many steps (give" in text


@on_ranks(2)
def test_a_rank_that_left_before_any_step_is_not_said_to_lack_batches():
    comm.traffic.ended = 0
    if dist.get_rank() == 1:
        tulle.init(data=-1)
        board.leave_in_peace()
        leave_the_team()
        return
    text = failure_of(all_reduce)
    assert ": rank 1 left before any step: every rank must come to the same calls of tulle, and take as many" in text


@on_ranks(2)
@pytest.mark.parametrize("call", [broadcast, all_gather, all_gather_parts, large_parts])
def test_after_the_process_group_was_destroyed_the_mend_is_named(call):
    axis = impatient(tulle.init(data=-1)["data"], 60)
    dist.destroy_process_group()
    with pytest.raises(
        CommunicationError, match=r"process groups are gone, since .*destroy_process_group\(\) was called"
    ):
        call(axis).wait()
    with pytest.raises(CommunicationError, match=r"or go on with a mesh that tulle\.init makes anew on every rank"):
        comm.lane(axis, "checkpoint")


@on_ranks(2)
def test_a_number_of_all_that_one_rank_asks_for_alone_meets_no_other_exchange():
    axis = impatient(tulle.init(data=-1)["data"], 0.5)
    number = torch.tensor(3.0 + axis.rank)
    if axis.rank == 0:
        text = "one number of all of words.weight was called on rank 0 .*, but rank 1 did not come in 0.5 s: each rank"
        with pytest.raises(CommunicationError, match=text):
            comm.number_of_all(number, "sum", axis, "words.weight")
    dist.barrier()
    assert comm.number_of_all(number, "sum", axis, "words.weight") == 7.0
    assert comm.number_of_all(number, "max", axis, "words.weight") == 4.0


def test_a_process_fails_by_what_nobody_caught_not_by_what_was_printed(monkeypatch):
    def last(error):
        monkeypatch.setattr(sys, "last_value", error, raising=False)
        return board.is_failing()

    monkeypatch.delattr(sys, "last_value", raising=False)
    assert not board.is_failing()
    assert not last(UserWarning("a warning of C++ that is an error"))
    with pytest.raises(ZeroDivisionError) as caught:
        raise ZeroDivisionError
    assert not last(caught.value)  # as after a notebook's cell
    uncaught, is_done = [], threading.Event()

    def called_by_nobody():
        try:
            raise ZeroDivisionError
        except ZeroDivisionError as error:
            uncaught.append(error)
        is_done.set()

    _thread.start_new_thread(called_by_nobody, ())
    assert is_done.wait(10)
    assert last(uncaught[0])


@on_ranks(2)
@pytest.mark.parametrize("call", CALLS)
def test_when_a_rank_stands_still_the_others_raise_within_the_timeout(call):
    axis = impatient(tulle.init(data=-1)["data"], timeout_s=0.2)
    if axis.rank == 0:
        board.leave_failure("rank 1 reads a large file")
        begin_s = time.monotonic()
        with pytest.raises(CommunicationError, match=r"\(2 ranks, timeout 0.2 s\): rank 1 reads a large file"):
            call(axis).wait()
        assert time.monotonic() - begin_s < 5


@on_ranks(2)
def test_setting_up_fails_alike():
    axis = impatient(tulle.init(data=-1)["data"], timeout_s=0.2)
    if axis.rank == 0:
        text = r"agreement of the model in step \d+ failed on rank 0 .*: rank 1 did not come to it: see the log there"
        with pytest.raises(CommunicationError, match=text):
            comm.gather_values(1, axis, label="the model")


@on_ranks(2)
def test_the_first_of_several_words_is_kept():
    if dist.get_rank() == 0:
        board.leave_failure("rank 0 fell")
    dist.barrier()
    if dist.get_rank() == 1:
        board.leave_failure("rank 1 fell, because rank 0 had")
    dist.barrier()
    assert board.first_failure() == "rank 0 fell"


@on_ranks(1)
def test_without_a_word_there_is_none_after_some_patience():
    begin_s = time.monotonic()
    assert board.first_failure(patience_s=0.1) is None
    assert time.monotonic() - begin_s < 1


def test_without_a_process_group_there_is_nobody_to_tell():
    board.leave_failure("nobody hears it")
    assert board.first_failure() is None


@on_ranks(1)
def test_an_exception_that_nobody_catches_is_left_for_the_others():
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "excepthook", lambda *error: seen.append(error[0]))
        board.watch.cache_clear()
        board.watch()
        sys.excepthook(DataError, DataError("line 12 is not UTF-8"), None)
    assert board.first_failure() == "rank 0 failed first with DataError: line 12 is not UTF-8"
    assert seen == [DataError], "the traceback is shown as ever"


@on_ranks(1, 2, 3, 4)
def test_what_one_rank_finds_is_raised_by_all():
    axis = tulle.init(data=-1)["data"]
    last = axis.size - 1
    found = GradientError("it is NaN") if axis.rank == last else None
    with pytest.raises(GradientError) as failure:
        comm.raise_together(found, axis, label="here")
    assert str(failure.value) == ("it is NaN" if axis.rank == last else f"rank {last}: it is NaN")
    assert axis.rank != last or failure.value is found, "with a copy a traceback would tell it twice"


@on_ranks(3)
def test_of_several_errors_all_raise_that_of_the_lowest_rank():
    axis = tulle.init(data=-1)["data"]
    found = [None, MeshError("first"), DataError("second")][axis.rank]
    with pytest.raises(MeshError, match="first"):
        comm.raise_together(found, axis, label="here")


@on_ranks(1, 2)
def test_where_nobody_found_anything_nobody_raises():
    comm.raise_together(None, tulle.init(data=-1)["data"], label="here")


def test_an_error_of_the_backend_that_says_nothing_is_told_of_all_the_same():
    axis = tulle.init(data=-1)["data"]
    exchange = Exchange("send", axis, "words", 0, 0)
    with pytest.raises(CommunicationError, match=r"send of words in step .* said: $"), translated(exchange):
        raise RuntimeError


@on_ranks(1)
def test_memory_that_ends_is_told_as_that():
    axis = tulle.init(data=-1)["data"]
    with pytest.raises(torch.OutOfMemoryError), translated(Exchange("all_reduce", axis, "words", 0, 0)):
        raise torch.OutOfMemoryError("CUDA out of memory")
