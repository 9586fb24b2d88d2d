"""`Tail`: the lines that were added to a file since the last look."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

_CHUNK_BYTES = 1 << 20


class Tail:
    """Reads a growing file on and never twice; a line counts when its end is written.

    Args:
        path: The file; it need not be there yet.
        skip_bytes: Where to begin.
        limit: Called after each look at the file: where to stop for good, or None to go on.
    """

    def __init__(self, path: Path, *, skip_bytes: int = 0, limit: Callable[[], int | None] = lambda: None) -> None:
        self._path = path
        self._offset_bytes = skip_bytes
        self._limit = limit
        self._torn = b""

    def read(self) -> list[str]:
        """The whole lines that are new, without their ends."""
        whole: list[bytes] = []
        while chunk := self._next_chunk():
            *lines, self._torn = (self._torn + chunk).split(b"\n")
            whole += lines
        return [line.decode(errors="replace") for line in whole]

    def rest(self) -> list[str]:
        """The last line, if the file ended without its end."""
        torn, self._torn = self._torn, b""
        return [torn.decode(errors="replace")] if torn else []

    def _next_chunk(self) -> bytes:
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset_bytes)
                chunk = file.read(_CHUNK_BYTES)
        except FileNotFoundError:
            return b""
        limit = self._limit()
        if limit is not None:
            chunk = chunk[: max(0, limit - self._offset_bytes)]
        self._offset_bytes += len(chunk)
        return chunk
