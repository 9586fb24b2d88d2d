"""`WholeFolder`: a folder that is complete or absent, whenever its writing is interrupted.

| folder | |
|---|---|
| `name/` | what a reader sees: the old one, or the new one |
| `.name.partial/` | what is being written; at the end it changes places with the old one, in one instant |
| `.name.previous/` | the old one, for an instant, on a file system that cannot do so |
"""

from __future__ import annotations

import ctypes
import os
import shutil
from pathlib import Path

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # of Linux' renameat2


class WholeFolder:
    """A folder that is written aside.

    Args:
        path: Its name.
        marker: A file that every such folder has.
    """

    def __init__(self, path: Path, marker: str) -> None:
        self.path = path
        self.aside = path.with_name(f".{path.name}.partial")
        self._previous = path.with_name(f".{path.name}.previous")
        self._marker = marker

    @property
    def found(self) -> Path:
        """Where a reader finds it, if it is there."""
        return self._previous if not self.path.exists() and self._previous.exists() else self.path

    @property
    def is_free(self) -> bool:
        """Whether nothing but an older one, or an empty folder, would be replaced."""
        found = self.found
        return not found.exists() or (found / self._marker).is_file() or _is_empty_folder(found)

    def prepare(self) -> None:
        """Make an empty folder aside.

        Raises:
            OSError: If it cannot be made.
        """
        if self.found is self._previous:
            self._previous.rename(self.path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.discard()
        self.aside.mkdir()

    def discard(self) -> None:
        """Remove what is aside, if anything is."""
        shutil.rmtree(self.aside, ignore_errors=True)

    def commit(self) -> None:
        """Put what is aside in the place of the old one, which is removed.

        Raises:
            OSError: If it cannot be put there.
        """
        _sync(self.aside)
        if not self.path.exists():
            self.aside.rename(self.path)
        elif not _swap(self.aside, self.path):
            shutil.rmtree(self._previous, ignore_errors=True)
            self.path.rename(self._previous)
            self.aside.rename(self.path)
            shutil.rmtree(self._previous)
        _sync(self.path.parent)
        self.discard()


def _is_empty_folder(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _swap(first: Path, second: Path) -> bool:
    """Let two folders change names, in one instant: Linux can, on most file systems."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    if rename is None:
        return False
    return rename(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE) == 0
