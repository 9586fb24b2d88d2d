"""Warm teams of gloo ranks: `@on_ranks(1, 2, 4)` runs a test's body on every rank of a fresh process group.

A cold start of four processes costs seconds, because each imports torch; a warm team costs 0.05 s a test.
So processes are forked from one that has imported it when a test first needs them, and stay for the session; each
can be any rank of any team. One test goes like this, all messages over one pipe a rank:

    the test (this process)             each rank (rank_process.py)
    assignment ───────────────────────▶ new process group, body(**arguments)
    all outcomes, or a failure ◀─────── outcome: the value that the body returned, or a traceback
    dismissal ────────────────────────▶ destroys the group, waits for the next assignment

A rank keeps its group until the dismissal, so that one that is done early does not cut off a slower peer; the
first failure dismisses all, so that peers that wait for the failed rank in a collective fail at once.
"""

import contextlib
import functools
import inspect
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest

from rank_process import Assignment, Outcome, serve, stack_path

DEADLINE_S = 60.0  # for a body; three times the time-out of a collective, which should be the first to speak
START_S = 120.0  # for a new process to import torch, on a machine that is busy
GRACE_S = 5.0  # between a rank's own deadline, at which it shows its stack and exits, and ours


@dataclass(slots=True)
class Worker:
    """A process that waits to be a rank, and our end of its pipe."""

    process: ForkServerProcess
    connection: Connection
    ready: bool = False


MOST_THREADS = 48  # of a process that waits: each group that an exchange left hanging keeps three, which poll
QUICK_SIZE = 3  # an odd number of ranks finds the most for the least
STARTED_AT_ONCE = 4  # most tests need up to four
WORKERS: list[Worker] = []

Body = Callable[..., object]


def on_ranks(
    *sizes: int, deadline_s: float = DEADLINE_S, probes: bool = False
) -> Callable[[Body], Callable[..., None]]:
    """Run the decorated test's body on every rank of a team, for each of `sizes`.

    The largest size up to `QUICK_SIZE` is in the default run, the others are marked slow. Networks are taken for
    gigabit Ethernet unless the body `probes`, as to measure one takes up to a second.
    Fixtures and `parametrize` work as ever; their values must pickle, as each rank gets a copy.
    Inside `@given`, where decorators do not mix, call `run_on_ranks` from the test's body.
    """

    def decorate(body: Body) -> Callable[..., None]:
        @functools.wraps(body)
        def test(team_size: int, **arguments: Any) -> None:
            run_on_ranks(team_size, body, deadline_s=deadline_s, probes=probes, **arguments)

        parameters = inspect.signature(body).parameters.values()
        team_size = inspect.Parameter("team_size", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        test.__signature__ = inspect.Signature([team_size, *parameters])  # what pytest reads fixtures from
        test.body_on_ranks = body  # what a rank runs when it looks the test up by name
        quick = max((size for size in sizes if size <= QUICK_SIZE), default=min(sizes))
        marks = {size: () if size == quick else pytest.mark.slow for size in sizes}
        cases = [pytest.param(size, marks=marks[size], id=f"{size}-ranks") for size in sizes]
        return pytest.mark.parametrize("team_size", cases)(test)

    return decorate


def run_on_ranks(
    size: int, body: Body, /, *, deadline_s: float = DEADLINE_S, probes: bool = False, **arguments: Any
) -> list[Any]:
    """Run `body(**arguments)` on `size` ranks and return what each returned, in rank order.

    Fails the test with the traceback of the rank that failed first; skips it if all ranks skipped. `body` is
    found by module and name on the ranks, which obey the warning filters of the calling test.
    """
    if "<" in body.__qualname__:
        raise ValueError(f"ranks find {body.__qualname__!r} by its name: move it to the top of its module")
    payload = pickle.dumps((body.__module__, body.__qualname__, arguments, list(warnings.filters)))
    team = _muster(size)
    folder = tempfile.mkdtemp(dir=_session().name)
    try:
        for rank, worker in enumerate(team):
            worker.connection.send(Assignment(rank, size, folder, deadline_s, probes, payload))
        outcomes = _collect(team, Path(folder), deadline_s)
    except BaseException:  # Ctrl-C: the ranks are in the middle of the body
        _end(team)
        raise
    if any(outcome.kind == "lost" for outcome in outcomes):
        _end(team)
    return _judge(outcomes)


def end_all_workers() -> None:
    """End the processes; a test that needs some spawns new ones."""
    _end(list(WORKERS))


@functools.cache
def _session() -> tempfile.TemporaryDirectory[str]:
    """What the folders of all tests are in, until the end: a group's store may write when it goes, after the test."""
    return tempfile.TemporaryDirectory(prefix="tulle-ranks-", ignore_cleanup_errors=True)


def _end(workers: Sequence[Worker]) -> None:
    for worker in workers:
        worker.process.kill()
    for worker in workers:
        worker.process.join()
        worker.process.close()
        worker.connection.close()
        WORKERS.remove(worker)


def _muster(size: int) -> list[Worker]:
    """Return `size` workers that are ready, starting those that are missing, all at once."""
    _end([worker for worker in WORKERS[:size] if _threads_of(worker) > MOST_THREADS])
    if len(WORKERS) < size:
        _start(max(size, STARTED_AT_ONCE) - len(WORKERS))
    team = WORKERS[:size]
    if not all(_is_ready(worker) for worker in team):
        _end(team)
        pytest.fail(f"one of {size} processes did not start; its own message is above", pytrace=False)
    return team


def _threads_of(worker: Worker) -> int:
    tasks = Path(f"/proc/{worker.process.pid}/task")
    return len(list(tasks.iterdir())) if tasks.exists() else 0


def _start(count: int) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["rank_server"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # the server is not told it otherwise
        patch.setenv("OMP_NUM_THREADS", "1")  # torch reads it on import; ranks share the cores
        patch.setenv("GLOO_SOCKET_IFNAME", "lo")  # do not depend on how the machine resolves its own name
        for _ in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()  # else the end of the process would not close the pipe
            WORKERS.append(Worker(process, ours))


def _is_ready(worker: Worker) -> bool:
    if not worker.ready and worker.connection.poll(START_S):
        with contextlib.suppress(EOFError):
            worker.ready = worker.connection.recv()
    return worker.ready


def _collect(team: Sequence[Worker], folder: Path, deadline_s: float) -> list[Outcome]:
    """Wait for each rank's outcome, which is 'lost' if it died or is silent past the deadline."""
    waiting = {worker.connection: rank for rank, worker in enumerate(team)}
    dismissed = False
    outcomes: list[Outcome] = []
    end_s = time.monotonic() + deadline_s + GRACE_S
    while waiting:
        ready = wait(waiting, timeout=max(0.0, end_s - time.monotonic()))
        for connection in ready or list(waiting):
            rank = waiting.pop(connection)
            outcomes.append(_receive(rank, team[rank], folder, silent=not ready))
        if not dismissed and (not waiting or any(outcome.kind != "passed" for outcome in outcomes)):
            dismissed = True
            _dismiss(team)
    return sorted(outcomes, key=lambda outcome: outcome.rank)


def _dismiss(team: Sequence[Worker]) -> None:
    for worker in team:
        with contextlib.suppress(OSError):  # a rank has died, which _collect reports
            worker.connection.send("dismissed")


def _receive(rank: int, worker: Worker, folder: Path, *, silent: bool) -> Outcome:
    if silent:
        return Outcome(rank, "lost", time.monotonic(), report="it never answered")
    try:
        return pickle.loads(worker.connection.recv_bytes())
    except (EOFError, OSError):
        worker.process.join(GRACE_S)
    return Outcome(rank, "lost", time.monotonic(), report=_how_it_ended(worker, stack_path(folder, rank)))


def _how_it_ended(worker: Worker, stack: Path) -> str:
    code = worker.process.exitcode
    by_signal = code is not None and code < 0
    ended = f"it died: {signal.Signals(-code).name}" if by_signal else f"it died: exit code {code}"
    text = stack.read_text() if stack.exists() else ""
    if text.startswith("Timeout"):
        ended = "it did not finish within its deadline"
    return f"{ended}; its stack, innermost call first:\n{text}" if text else ended


def _judge(outcomes: Sequence[Outcome]) -> list[Any]:
    """Return the values of ranks that all passed; else fail, or skip if all ranks skipped."""
    kinds = {outcome.kind for outcome in outcomes}
    if kinds == {"passed"}:
        return [outcome.value for outcome in outcomes]
    if kinds == {"skipped"}:
        pytest.skip(outcomes[0].report)
    pytest.fail(_report(outcomes), pytrace=False)


def _report(outcomes: Sequence[Outcome]) -> str:
    """Tell the cause first: lost ranks, then the earliest failure; peers that fell with it get one line."""
    size = len(outcomes)
    lost = [outcome for outcome in outcomes if outcome.kind == "lost"]
    failed = sorted((o for o in outcomes if o.kind == "failed"), key=lambda outcome: outcome.at_s)
    lines = [f"rank {outcome.rank} of {size} was lost: {outcome.report}" for outcome in lost]
    for place, outcome in enumerate(failed):
        if place == 0:
            lines.append(f"rank {outcome.rank} of {size} failed first:\n{outcome.report}")
        else:
            delay_s = outcome.at_s - failed[0].at_s
            last_line = outcome.report.strip().splitlines()[-1]
            lines.append(f"rank {outcome.rank} failed {delay_s:.3f} s later: {last_line}")
    skipped = [outcome.rank for outcome in outcomes if outcome.kind == "skipped"]
    if skipped:
        lines.append(f"ranks {skipped} of {size} skipped the test, the others did not: all must, or none")
    return "\n".join(lines)
