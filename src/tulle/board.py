"""Where a rank that fails leaves word, so that the others can say who fell first instead of "connection closed"."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from functools import cache
from types import TracebackType

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

_COUNT = "tulle/failures"
_FIRST = "tulle/failure"
_WAITING = "tulle/waiting"
_PLACE = "tulle/place"


def leave(text: str) -> None:
    """Leave word that this rank failed; only the first rank's word is kept. Never raises."""
    try:
        store = _store()
        if store is not None and store.add(_COUNT, 1) == 1:
            store.set(_FIRST, text)
    except (RuntimeError, OSError):
        pass  # the store went with the rank that held it: there is nobody to tell


def read(*, patience_s: float = 1.0) -> str | None:
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
    """Leave word that this rank waits for an exchange in vain. Never raises."""
    try:
        store = _store()
        if store is not None:
            store.set(f"{_WAITING}/{key}/{rank}", "")
    except (RuntimeError, OSError):
        pass


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
    """Leave word where this rank is, and give the places of those that have left word under the same key.

    Never raises.
    """
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
    """This rank has gone on. Never raises."""
    try:
        store = _store()
        if store is not None:
            store.delete_key(f"{_PLACE}/{key}/{rank}")
    except (RuntimeError, OSError):
        pass


@cache
def watch() -> None:
    """Leave word of an exception that nobody catches, before the process ends and its connections close."""
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if dist.is_initialized():
            notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
            leave(f"rank {dist.get_rank()} failed first with {kind.__name__}: {error}{notes}")
        previous(kind, error, trace)

    sys.excepthook = hook


def _store() -> Store | None:
    if not dist.is_initialized():
        return None
    return dist.distributed_c10d._get_default_store()
