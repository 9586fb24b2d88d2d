"""`Tail`: the lines that were added to a file since the last look."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

_CHUNK_BYTES = 1 << 20


class Tail:
    """Reads a growing file on and never twice; a line counts when its end is written.

    A file that takes its place is read from its begin. Of a line that is written over again and again, as progress bars
    do, only the latest state is kept.

    Args:
        path: The file; it need not be there yet.
        skip: Leave out what the file holds already.
        limit: Called after each look at the file: where to stop for good, or None to go on.
    """

    def __init__(self, path: Path, *, skip: bool = False, limit: Callable[[], int | None] = lambda: None) -> None:
        self._path = path
        self._offset_bytes, self._inode = 0, 0
        if skip:
            status = path.stat()
            self._offset_bytes, self._inode = status.st_size, status.st_ino
        self._limit = limit
        self._torn = b""

    def read(self) -> list[str]:
        """The whole lines that are new, without their ends."""
        whole: list[bytes] = []
        while chunk := self._next_chunk():
            *lines, torn = (self._torn + chunk).split(b"\n")
            self._torn = torn[torn.rfind(b"\r", 0, -1) + 1 :]
            whole += lines
        return [line.decode(errors="replace") for line in whole]

    def rest(self) -> list[str]:
        """The last line, if the file ended without its end."""
        torn, self._torn = self._torn, b""
        return [torn.decode(errors="replace")] if torn else []

    def _next_chunk(self) -> bytes:
        try:
            with self._path.open("rb") as file:
                inode = os.fstat(file.fileno()).st_ino
                if inode != self._inode and self._inode:
                    self._offset_bytes, self._torn = 0, b""
                self._inode = inode
                file.seek(self._offset_bytes)
                chunk = file.read(_CHUNK_BYTES)
        except FileNotFoundError:
            return b""
        limit = self._limit()
        if limit is not None:
            chunk = chunk[: max(0, limit - self._offset_bytes)]
        self._offset_bytes += len(chunk)
        return chunk


def last_state(line: str) -> str:
    r"""What a terminal shows of a line that was written over: its last state.

    Example:
        >>> last_state("  0%|  | 0/2\r 50%|# | 1/2\r100%|##| 2/2\r")
        '100%|##| 2/2'
    """
    return line.rstrip("\r").rsplit("\r", 1)[-1]
