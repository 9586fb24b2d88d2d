"""The process of one rank of a warm team: waits for a test's body, runs it in a process group, answers."""

import contextlib
import faulthandler
import functools
import gc
import importlib
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import on_device
from gigabit import GIGABIT
from tulle.engine import living
from tulle.mesh import Axis

COLLECTIVE_TIMEOUT_S = 20.0
patches = pytest.MonkeyPatch()
"""What a body patches by it stays so until its end, like what it patches by the fixture of that name."""
_MADE_BY_BODIES = (nn.Module, torch.Tensor, torch.optim.Optimizer, Axis)
_outlived: set[int] = set()
"""Such things, by identity, that were still there when the last body was over."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """What one rank is to run; `payload` is pickled apart, so that an error in reading it is the body's."""

    rank: int
    size: int
    folder: str
    deadline_s: float
    probes: bool
    payload: bytes


@dataclass(frozen=True, slots=True)
class Outcome:
    """How it went on one rank; `at_s` is on the monotonic clock, which the processes of a machine share."""

    rank: int
    kind: Literal["passed", "skipped", "failed", "lost"]
    at_s: float
    value: Any = None
    report: str = ""


def stack_path(folder: Path, rank: int) -> Path:
    """Where a rank that crashes or hangs leaves its stack."""
    return folder / f"stack-of-rank-{rank}.txt"


def serve(connection: Connection) -> None:
    """Run one assignment after the other, until the test session ends."""
    torch.set_num_threads(1)
    if on_device.DEVICE:
        on_device.begin()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the session, which then ends this process
    threading.Thread(target=_end_with_the_session, daemon=True).start()
    gc.freeze()  # what was imported stays, and the collection after each body need not look at it: see `_settle`
    connection.send(True)  # ready
    while True:
        assignment = connection.recv()
        with _stack_on_crash_or_deadline(assignment):
            answer = _answer(assignment)
        gc.collect()  # a failed body's frames may hold the group, whose sockets must close: its peers wait
        connection.send_bytes(answer)
        connection.recv()  # the dismissal
        if dist.is_initialized():
            dist.destroy_process_group()
        _settle()


def _settle() -> None:
    """Have later collections pass over what bodies leave for good: what they imported, caches of torch and of Python.

    Else each takes longer than the one before, in the end half of the suite's time. What bodies made is passed over
    only if it outlives two of them: it would never be collected on this rank, and ranks count by what others let go.
    """
    living._homes.clear()  # axes of process groups that are gone, kept for models on others
    gc.collect()  # the process group went after the last collection
    alive = {id(thing) for thing in gc.get_objects() if isinstance(thing, _MADE_BY_BODIES)}
    if alive <= _outlived:
        gc.freeze()
        alive.clear()
    _outlived.clear()
    _outlived.update(alive)


def _end_with_the_session() -> None:
    """Leave no orphan, even if the session was killed while a body ran."""
    session = multiprocessing.parent_process()
    assert session is not None
    session.join()
    os._exit(1)


@contextlib.contextmanager
def _stack_on_crash_or_deadline(assignment: Assignment) -> Iterator[None]:
    """Write the stack of all threads on a segmentation fault, or at the deadline, which ends this process.

    It is a thread in C that watches, so a body that holds the interpreter's lock does not escape.
    """
    with stack_path(Path(assignment.folder), assignment.rank).open("w") as file:
        faulthandler.enable(file)
        faulthandler.dump_traceback_later(assignment.deadline_s, exit=True, file=file)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()
            faulthandler.disable()


def _answer(assignment: Assignment) -> bytes:
    """Run the body and pickle its outcome; whatever it raises, `SystemExit` too, is an outcome."""
    outcome = functools.partial(Outcome, assignment.rank)
    try:
        value = _run_body(assignment)
        return pickle.dumps(outcome("passed", time.monotonic(), value))
    except pytest.skip.Exception as skipped:
        return pickle.dumps(outcome("skipped", time.monotonic(), report=str(skipped)))
    except BaseException as error:
        at_s = time.monotonic()
        kind = "lost" if isinstance(error, _NoGroupError) else "failed"
        return pickle.dumps(outcome(kind, at_s, report=_told_from_the_body(error)))


def _run_body(assignment: Assignment) -> object:
    module, name, arguments, filters = pickle.loads(assignment.payload)
    with warnings.catch_warnings(), _errors_of_threads(), _constants_stay():
        warnings.resetwarnings()
        warnings.filters.extend(filters)
        torch.manual_seed(0)
        torch.set_default_dtype(torch.float32)
        torch.distributions.Distribution.set_default_validate_args(value=True)  # what is compiled turns it off
        body = _find(module, name)
        _join(assignment)
        try:
            with contextlib.nullcontext() if assignment.probes else _known_network():
                return body(**arguments)
        finally:
            _undo([*arguments.values(), patches])


class _NoGroupError(Exception):
    """The group did not come about. Torch has counted it on this rank alone: no later one would find its peers."""


def _join(assignment: Assignment) -> None:
    try:
        dist.init_process_group(
            "nccl" if on_device.DEVICE else "gloo",
            store=dist.FileStore(f"{assignment.folder}/rendezvous", assignment.size),
            rank=assignment.rank,
            world_size=assignment.size,
            timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S),
            device_id=torch.device("cuda", torch.cuda.current_device()) if on_device.DEVICE else None,
        )
    except Exception as error:
        raise _NoGroupError(f"rank {assignment.rank} could not join the others") from error


def _known_network() -> contextlib.AbstractContextManager[object]:
    """Have every network taken for measured."""
    return mock.patch.object(importlib.import_module("tulle.comm.probe"), "_measure", return_value=GIGABIT)


def _undo(arguments: Iterable[object]) -> None:
    """What a body patched goes with the body: this process runs other tests afterwards."""
    for argument in arguments:
        if isinstance(argument, pytest.MonkeyPatch):
            argument.undo()


@contextlib.contextmanager
def _errors_of_threads() -> Iterator[None]:
    """Raise what a thread of the body raised and nobody caught, once the body itself is done."""
    uncaught: list[threading.ExceptHookArgs] = []
    threading.excepthook = uncaught.append
    try:
        yield
    finally:
        threading.excepthook = threading.__excepthook__
    if uncaught and uncaught[0].exc_value is not None:
        raise uncaught[0].exc_value


@contextlib.contextmanager
def _constants_stay() -> Iterator[None]:
    """Put back what a body has set for good in the library's modules, and fail it.

    This process is another rank of another team next: of one whose other ranks would go by other numbers, and wait.
    """
    before = _constants()
    try:
        yield
    finally:
        now = _constants()
        changed = [place for place, value in before.items() if now.get(place, value) != value]
        for module, name in changed:
            setattr(sys.modules[module], name, before[module, name])
    names = ", ".join(".".join(place) for place in changed)
    assert not changed, f"the body has set {names} for good: set it by rank_process.patches"


def _constants() -> dict[tuple[str, str], object]:
    modules = sorted(name for name in sys.modules if name.split(".")[0] == "tulle")
    return {place: vars(sys.modules[place[0]]).get(place[1]) for module in modules for place in _places(module)}


@functools.cache
def _places(module: str) -> list[tuple[str, str]]:
    """Where a module's constants are. To look through all names of all modules took a tenth of the suite's time."""
    constants = vars(sys.modules[module]).items()
    return [(module, name) for name, value in constants if name.isupper() and isinstance(value, int | float | str)]


def _find(module: str, name: str) -> Callable[..., object]:
    found: Any = functools.reduce(getattr, name.split("."), importlib.import_module(module))
    return getattr(found, "body_on_ranks", found)


def _told_from_the_body(error: BaseException) -> str:
    """Format the traceback without this file's own frames, unless the error arose in them."""
    frame = error.__traceback__
    while frame is not None and frame.tb_frame.f_code.co_filename == __file__:
        frame = frame.tb_next
    error.__traceback__ = frame or error.__traceback__
    return "".join(traceback.format_exception(error))
