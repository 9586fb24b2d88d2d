"""`Watcher`: a thread of the launcher that shows what the ranks record and what rank 0 writes."""

from __future__ import annotations

import json
import threading
from contextlib import suppress
from types import TracebackType
from typing import Protocol

from tulle.cli.folder import RunFolder
from tulle.cli.progress import RunProgress
from tulle.cli.tail import Tail, last_state

_PERIOD_S = 0.25


class View(Protocol):
    """Where the watcher shows things."""

    def show_line(self, line: str) -> None:
        """Show a line that rank 0 wrote."""

    def show_progress(self, progress: RunProgress) -> None:
        """Show the ranks' numbers; called four times a second."""

    def close(self) -> None:
        """Leave the terminal as it was found."""


class Watcher:
    """While it is entered, its thread reads the run folder four times a second and shows what is new.

    Args:
        folder: The run folder.
        view: Where to show it.
    """

    def __init__(self, folder: RunFolder, view: View) -> None:
        self._folder = folder
        self._view = view
        self._progress = RunProgress(folder.path)
        self._tails: list[Tail] = []  # one an attempt
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="tulle-watcher", daemon=True)

    def __enter__(self) -> Watcher:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        try:
            while not self._over.wait(_PERIOD_S):
                self._look()
            self._look()  # what the ranks wrote last
            self._show_last(self._tails[-1:])
        finally:
            self._view.close()

    def _look(self) -> None:
        for log in self._folder.attempts[len(self._tails) :]:  # an attempt may be over before it was seen
            self._show_last(self._tails[-1:])
            self._tails.append(Tail(log, limit=self._traceback_begins))
        for tail in self._tails[-1:]:
            self._show(tail.read())
        self._progress.update()
        self._view.show_progress(self._progress)

    def _show_last(self, tails: list[Tail]) -> None:
        for tail in tails:
            self._show([*tail.read(), *tail.rest()])

    def _show(self, lines: list[str]) -> None:
        for line in lines:
            self._view.show_line(last_state(line))

    def _traceback_begins(self) -> int | None:
        """Where rank 0's log goes over to its traceback, which is shown among the failures or not at all."""
        with suppress(OSError, ValueError, KeyError):
            word = json.loads((self._folder.path / "failure-rank-0.json").read_text(encoding="utf-8"))
            return word["log_bytes"]
        return None
