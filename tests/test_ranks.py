"""The warm teams keep their promises: each failure on a rank is told by name, and the next test works."""

import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

import rank_process
import ranks
import tulle.mesh
from ranks import DEADLINE_S, on_ranks, run_on_ranks


@on_ranks(1, 2, 3, 4)
def test_every_rank_takes_part():
    ranks = torch.zeros(dist.get_world_size(), dtype=torch.int64)
    ranks[dist.get_rank()] = dist.get_rank()
    dist.all_reduce(ranks)
    assert ranks.tolist() == list(range(dist.get_world_size()))


@pytest.mark.parametrize("addend", [1, 2])
@on_ranks(2)
def test_fixtures_and_parameters_reach_every_rank(addend: int, tmp_path: Path):
    total = torch.tensor([addend])
    dist.all_reduce(total)
    assert total.item() == 2 * addend
    (tmp_path / f"rank-{dist.get_rank()}").touch()
    dist.barrier()
    assert len(list(tmp_path.iterdir())) == 2


def square_of_rank(offset: int) -> int:
    return offset + dist.get_rank() ** 2


def test_values_come_back_in_rank_order():
    assert run_on_ranks(4, square_of_rank, offset=10) == [10, 11, 14, 19]


@settings(max_examples=10)
@given(numbers=st.lists(st.integers(-1000, 1000), min_size=1, max_size=4))
def test_works_inside_hypothesis(numbers: list[int]):
    assert run_on_ranks(2, sum_over_ranks, numbers=numbers) == [[2 * number for number in numbers]] * 2


def sum_over_ranks(numbers: list[int]) -> list[int]:
    total = torch.tensor(numbers)
    dist.all_reduce(total)
    return total.tolist()


def wrong_on_rank_1() -> None:
    dist.barrier()  # on a busy machine rank 0 may be about to join still, and then is lost first
    expected = 3 + dist.get_rank()
    assert expected == 3
    dist.barrier()


def test_a_failing_rank_fails_the_test_with_its_traceback_first():
    started_s = time.monotonic()
    report = failure_of(2, wrong_on_rank_1)
    assert report.startswith("rank 1 of 2 failed first:\nTraceback")
    assert "in wrong_on_rank_1\n    assert expected == 3" in report
    assert "AssertionError: assert 4 == 3" in report
    assert "rank 0 failed 0." in report.splitlines()[-1]
    assert time.monotonic() - started_s < 10, "rank 0 waited for the time-out of its barrier"


def exits_on_rank_1() -> None:
    if dist.get_rank() == 1:
        os._exit(3)
    dist.barrier()


def killed_on_rank_0() -> None:
    if dist.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGSEGV)
    dist.barrier()


@pytest.mark.slow
def test_a_rank_that_dies_is_named_and_the_next_test_works():
    assert failure_of(2, exits_on_rank_1).startswith("rank 1 of 2 was lost: it died: exit code 3\n")
    crash = failure_of(2, killed_on_rank_0)
    assert crash.startswith("rank 0 of 2 was lost: it died: SIGSEGV; its stack")
    assert "in killed_on_rank_0" in crash
    assert run_on_ranks(2, square_of_rank, offset=0) == [0, 1]


def hangs_on_rank_1() -> None:
    if dist.get_rank() == 1:
        signal.pause()


def test_a_rank_that_hangs_is_named_within_its_deadline_and_shows_where():
    run_on_ranks(2, square_of_rank, offset=0)  # a warm team: only the hang is timed
    started_s = time.monotonic()
    report = failure_of(2, hangs_on_rank_1, deadline_s=1.0)
    assert time.monotonic() - started_s < 3
    assert report.startswith("rank 1 of 2 was lost: it did not finish within its deadline; its stack")
    assert "in hangs_on_rank_1" in report
    assert run_on_ranks(2, square_of_rank, offset=0) == [0, 1]


def skips_where(last_rank: int) -> None:
    if dist.get_rank() <= last_rank:
        pytest.skip("no such device")


def test_a_test_is_skipped_only_if_all_ranks_skip_it():
    with pytest.raises(pytest.skip.Exception, match="no such device"):
        run_on_ranks(2, skips_where, last_rank=1)
    assert failure_of(2, skips_where, last_rank=0).startswith("ranks [0] of 2 skipped the test")


def warns() -> None:
    warnings.warn("this is old", UserWarning, stacklevel=1)


def test_ranks_obey_the_warning_filters_of_the_test():
    assert "UserWarning: this is old" in failure_of(1, warns)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run_on_ranks(1, warns)


def test_what_a_rank_does_not_find_or_cannot_send_is_told():
    with pytest.raises(ValueError, match="move it to the top of its module"):
        run_on_ranks(1, lambda: None)
    assert "cannot pickle" in failure_of(1, returns_what_does_not_pickle)


def returns_what_does_not_pickle() -> object:
    return (number for number in range(3))


def leaves_the_group(seed: int) -> float:
    torch.set_default_dtype(torch.float64)
    dist.barrier()  # a rank that left before the other has joined would fail it
    dist.destroy_process_group()
    return torch.rand(()).item() + seed


def test_nothing_of_one_body_is_left_for_the_next():
    first = run_on_ranks(2, leaves_the_group, seed=0)
    assert run_on_ranks(2, leaves_the_group, seed=0) == first
    assert run_on_ranks(2, default_dtype) == [torch.float32] * 2


def default_dtype() -> torch.dtype:
    return torch.get_default_dtype()


def joins_alone() -> None:
    dist.destroy_process_group()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_process, "COLLECTIVE_TIMEOUT_S", 0.2)
        rank_process._join(rank_process.Assignment(0, 2, tempfile.mkdtemp(), 1.0, False, b""))


def test_ranks_that_do_not_come_together_are_replaced():
    before = [worker.process.pid for worker in ranks.WORKERS[:1]]
    assert "could not join the others" in failure_of(1, joins_alone)
    assert run_on_ranks(2, square_of_rank, offset=0) == [0, 1]
    assert before[0] not in [worker.process.pid for worker in ranks.WORKERS]


def patches_and_tells(name: str, monkeypatch: pytest.MonkeyPatch) -> bool:
    is_patched = name in os.environ
    monkeypatch.setenv(name, "set by an earlier body")
    return is_patched


def test_what_one_body_patches_is_undone_before_the_next(monkeypatch):
    for _ in range(2):
        assert run_on_ranks(2, patches_and_tells, name="TULLE_PATCHED", monkeypatch=monkeypatch) == [False, False]


def sets_a_constant() -> None:
    tulle.mesh.DEFAULT_TIMEOUT_S = 1.0


def timeout_of_a_mesh() -> float:
    return tulle.mesh.DEFAULT_TIMEOUT_S


def test_what_one_body_sets_for_good_fails_it_and_is_put_back():
    assert "has set tulle.mesh.DEFAULT_TIMEOUT_S for good: set it by" in failure_of(1, sets_a_constant)
    assert run_on_ranks(1, timeout_of_a_mesh) == [600.0]


def raises_in_a_thread() -> None:
    thread = threading.Thread(target=square_of_rank, args=("not a number",), name="lane")
    thread.start()
    thread.join()


def test_an_error_in_a_thread_of_the_body_fails_the_test():
    assert "in square_of_rank" in failure_of(1, raises_in_a_thread)


def kills_its_session() -> None:
    session = multiprocessing.parent_process()  # the process' own parent is the server that forked it
    assert session is not None
    assert session.pid is not None
    os.kill(session.pid, signal.SIGKILL)
    signal.pause()


SESSION = """
import ranks, test_ranks
ranks.STARTED_AT_ONCE = 1
ranks.run_on_ranks(1, test_ranks.kills_its_session)
"""


@pytest.mark.slow
def test_a_busy_rank_does_not_outlive_its_session():
    # The rank inherits the pipe of stdout: `run` returns once the rank, too, has closed it.
    session = subprocess.run(
        [sys.executable, "-c", SESSION],
        cwd=Path(__file__).parent,
        stdout=subprocess.PIPE,
        timeout=DEADLINE_S / 2,
        check=False,
    )
    assert session.returncode == -signal.SIGKILL


def failure_of(size: int, body, **arguments) -> str:
    """Run a body that must fail, and return the report."""
    with pytest.raises(pytest.fail.Exception) as failure:
        run_on_ranks(size, body, **arguments)
    return str(failure.value)
