"""`WholeFolder`: a folder that is complete or absent, whenever its writing is interrupted.

| folder | |
|---|---|
| `name/` | what a reader sees: the old one, or the new one |
| `.name.partial/` | what is being written; at the end it changes places with the old one, in one instant |
| `.name.previous/` | the old one, for an instant, on a file system that cannot do so |
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tulle.errors import CheckpointError

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # of Linux' renameat2


class WholeFolder:
    """A checkpoint's folder, which is written aside.

    Args:
        path: Its name. What a link leads to is written, and the link stays.
        marker: A file that every such checkpoint has.
        saver: What writes it, as users know it.

    Raises:
        CheckpointError: If that is no name.
    """

    def __init__(self, path: str | os.PathLike[str], marker: str, saver: str) -> None:
        self.path = Path(path).resolve() if Path(path).is_symlink() else Path(path)
        if not self.path.name:
            raise CheckpointError(
                f"{os.fspath(path)!r} was given for the checkpoint's folder, expected one with a name"
            )
        self.aside = self.path.with_name(f".{self.path.name}.partial")
        self._previous = self.path.with_name(f".{self.path.name}.previous")
        self._marker, self._saver = marker, saver

    @property
    def found(self) -> Path:
        """Where a reader finds it, if it is there."""
        return self._previous if not self.path.exists() and self._previous.exists() else self.path

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Wait until no other process of this machine is within its own turn at the folder above, and keep them out."""
        descriptor: int | None = None
        with suppress(OSError):  # what is wrong with the folder above is said when it is written to
            self.path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.path.parent, os.O_RDONLY)
            fcntl.flock(descriptor, fcntl.LOCK_EX)  # which network file systems may lack
        try:
            yield
        finally:
            if descriptor is not None:
                with suppress(OSError):
                    fcntl.flock(descriptor, fcntl.LOCK_UN)  # a process that was forked meanwhile has the descriptor too
                os.close(descriptor)

    def prepare(self) -> None:
        """Make an empty folder aside.

        Raises:
            CheckpointError: If something of this name is there that is no checkpoint.
            OSError: If it cannot be made.
        """
        found = self.found
        if found.exists() and not (found / self._marker).is_file() and not _is_empty_folder(found):
            raise CheckpointError(
                f"{str(self.path)!r} is there, and is no checkpoint: {self._saver} replaces nothing else. Give another "
                "name, or remove it"
            )
        if found is self._previous:
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
