"""The board: words that ranks leave for one another in the run's key-value store, for which no collective is needed.

    failure     of the rank that failed first, with its error: so others say who fell, not "connection closed"
    waiting     which ranks wait for an exchange in vain: so the error at the time-out names those who have not come
    place       where a rank stands, when exchanges that should meet do not
    come        which ranks have come to what all must come to
    begun       which backward of a rank has begun
    doing       what keeps a rank for which others may wait
    left        after which step a rank has left without an error

The store is torch's (`torch.distributed.Store`); the launcher or rank 0 holds it. Nothing here ever raises: where the
store is gone, there is nobody to tell.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from multiprocessing import parent_process
from multiprocessing.util import Finalize
from types import TracebackType

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

_COUNT = "tulle/failures"
_FIRST = "tulle/failure"
_WAITING = "tulle/waiting"
_PLACE = "tulle/place"
_DOING = "tulle/doing"
_LEFT = "tulle/left"
_COME = "tulle/come"
_BEGUN = "tulle/begun"
_MEND = "every rank must take as many steps (give all as many batches, as a loader with drop_last=True does)"
_EARLY = "every rank must come to the same calls of tulle, and take as many steps"
_kept: list[tuple[Store, int]] = []
"""The way to the board, and this rank, for the end of the process, by which the process group may be gone."""
_step: list[Callable[[], int]] = []
"""What tells the number of the step that came last."""
_ends: list[Finalize] = []
"""What looks at how a process of `multiprocessing` ends."""
_BEFORE_ALL = 100
"""Priority of what is called at the end of such a process: before its connections close."""


def leave_failure(text: str) -> None:
    """Leave word that this rank failed; only the first rank's word is kept."""
    try:
        store = _store()
        if store is not None and store.add(_COUNT, 1) == 1:
            store.set(_FIRST, text)
    except (RuntimeError, OSError):
        pass  # the store went with the rank that held it: there is nobody to tell


def first_failure(*, patience_s: float = 1.0) -> str | None:
    """The word of the rank that failed first, or None if no rank has left any after `patience_s` seconds."""
    deadline = time.monotonic() + patience_s
    try:
        store = _store()
        while store is not None:
            if store.check([_FIRST]):
                return store.get(_FIRST).decode()
            if time.monotonic() > deadline:
                return None
            time.sleep(0.05)
    except (RuntimeError, OSError):
        pass
    return None


def come(key: str, rank: int) -> None:
    """Leave word that this rank waits for an exchange in vain."""
    _write(f"{_WAITING}/{key}/{rank}", "")


def absent(key: str, ranks: Sequence[int], *, patience_s: float = 1.0) -> list[int]:
    """The ranks that have not left word that they wait for the same exchange: those that the others wait for."""
    deadline = time.monotonic() + patience_s
    missing = list(ranks)
    try:
        store = _store()
        while store is not None and missing and time.monotonic() < deadline:
            missing = [rank for rank in missing if not store.check([f"{_WAITING}/{key}/{rank}"])]
            time.sleep(0.05)
    except (RuntimeError, OSError):
        pass
    return missing


def places(key: str, rank: int, text: str, ranks: int) -> dict[int, str]:
    """Leave word where this rank is, and give the places of those that have left word under the same key."""
    found: dict[int, str] = {}
    try:
        store = _store()
        if store is not None:
            store.set(f"{_PLACE}/{key}/{rank}", text)
            there = [other for other in range(ranks) if store.check([f"{_PLACE}/{key}/{other}"])]
            found = {other: store.get(f"{_PLACE}/{key}/{other}").decode() for other in there}
    except (RuntimeError, OSError):
        pass
    return found


def forget_place(key: str, rank: int) -> None:
    """Take back where this rank was said to wait: it has gone on."""
    _delete(f"{_PLACE}/{key}/{rank}")


def arrive(key: str) -> None:
    """Leave word that this rank has come."""
    _write(f"{_COME}/{key}", "")


def have_come(keys: Sequence[str], *, patience_s: float = 0.0) -> bool:
    """Whether all have left word under these keys within so many seconds, or there is no board."""
    begin_s, pause_s = time.monotonic(), 0.001
    try:
        store = _store()
        while store is not None and not store.check([f"{_COME}/{key}" for key in keys]):
            if time.monotonic() - begin_s >= patience_s:
                return False
            time.sleep(pause_s)
            pause_s = min(0.05, 2 * pause_s)
    except (RuntimeError, OSError):
        pass
    return True


def take_back(key: str) -> None:
    """This rank has not come, after all."""
    _delete(f"{_COME}/{key}")


def begin(count: int) -> None:
    """Leave word of which backward of this rank begins."""
    if dist.is_initialized():
        _write(f"{_BEGUN}/{dist.get_rank()}", str(count))  # without an answer: some microseconds


def begun(rank: int) -> int:
    """Which backward of a rank of the run has begun, of those of which it has left word."""
    return int(_read(f"{_BEGUN}/{rank}") or 0)


def has_left(rank: int) -> bool:
    """Whether a rank of the run has left without an error."""
    return bool(_read(f"{_LEFT}/{rank}"))


def tell(rank: int, doing: str) -> None:
    """Leave word what a rank of the run is doing while others may wait for it; empty to take it back."""
    _write(f"{_DOING}/{rank}", doing)


def doing(rank: int) -> str:
    """What a rank of the run has left word to be doing, if it has."""
    return _read(f"{_DOING}/{rank}")


def departed(ranks: Sequence[int]) -> str | None:
    """Which of some ranks of the run have left without an error, in words, or None."""
    steps = {rank: step for rank in ranks if (step := _read(f"{_LEFT}/{rank}"))}
    if not steps:
        return None
    if {*steps.values()} == {"0"}:
        return f"{' and '.join(f'rank {rank}' for rank in steps)} left before any step: {_EARLY}"
    return f"{' and '.join(f'rank {rank} left after step {step}' for rank, step in steps.items())}: {_MEND}"


def count_steps(step: Callable[[], int]) -> None:
    """Have the number of the step that came last told by this."""
    _step[:] = [step]


def attend(*, outlives: bool) -> None:
    """Leave word at the end of the process that it left, unless an exception ends it.

    Args:
        outlives: Whether the store is there when the processes have gone, as that of a launcher is.
    """
    _kept.clear()
    store = _store()
    if store is not None and dist.get_world_size() > 1:
        if outlives:
            _kept.append((store, dist.get_rank()))
        atexit.unregister(leave_in_peace)
        atexit.register(leave_in_peace)  # runs before what ends the process group, which was registered earlier
        if parent_process() is not None and not any(end.still_active() for end in _ends):
            _ends[:] = [Finalize(None, _leave_for_parent, exitpriority=_BEFORE_ALL)]


def _leave_for_parent() -> None:
    """Leave word of how a process of `multiprocessing` ends: its exceptions it keeps for its parent, before any hook.

    `torch.multiprocessing.spawn` makes an exit of each, and one that was forked ends without what is for the exit.
    """
    error = sys.exception()
    if isinstance(error, SystemExit) and error.code:
        error = error.__context__
    if error is None or isinstance(error, SystemExit):
        leave_in_peace()
    else:
        atexit.unregister(leave_in_peace)
        _leave_error(error)


def leave_in_peace() -> None:
    """Leave word that this rank left without an error."""
    try:
        store = _store()
        found = [*_kept] if store is None else [(store, dist.get_rank())]
        for board, rank in found if not is_failing() else ():
            board.set(f"{_LEFT}/{rank}", str(max((step() for step in _step), default=0)))
    except (RuntimeError, OSError):
        pass


os.register_at_fork(after_in_child=partial(atexit.unregister, leave_in_peace))  # what is forked from a rank is none


def is_failing() -> bool:
    """Whether an exception that nobody caught ends this process.

    `sys.last_value` alone does not say so: C code that prints an exception sets it, a warning of torch's that is
    made an error, and so does a notebook after each cell that failed. One that nobody caught has come through the
    frame that nobody called.
    """
    trace = getattr(getattr(sys, "last_value", None), "__traceback__", None)
    return trace is not None and trace.tb_frame.f_back is None


@cache
def watch() -> None:
    """Leave word of an exception that nobody catches, before the process ends and its connections close."""
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        _leave_error(error)
        previous(kind, error, trace)

    sys.excepthook = hook


def _leave_error(error: BaseException) -> None:
    if dist.is_initialized():
        notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
        leave_failure(f"rank {dist.get_rank()} failed first with {type(error).__name__}: {error}{notes}")


def _write(key: str, text: str) -> None:
    try:
        store = _store()
        if store is not None:
            store.set(key, text)
    except (RuntimeError, OSError):
        pass


def _delete(key: str) -> None:
    try:
        store = _store()
        if store is not None:
            store.delete_key(key)
    except (RuntimeError, OSError):
        pass


def _read(key: str) -> str:
    try:
        store = _store()
        return store.get(key).decode() if store is not None and store.check([key]) else ""
    except (RuntimeError, OSError):
        return ""


def _store() -> Store | None:
    if not dist.is_initialized():
        return None
    return dist.distributed_c10d._get_default_store()
