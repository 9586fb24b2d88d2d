"""`Folder`: a checkpoint's folder, complete or absent whenever its writing is interrupted.

| file | |
|---|---|
| `run.pt` | all that is small: outline, random states, extra; sizes and checksums of the other files |
| `.metadata` | `torch.distributed.checkpoint`'s: which block of which tensor lies where |
| `__0_0.distcp` | blocks that rank 0 wrote |

It is written aside: see `WholeFolder`.
"""

from __future__ import annotations

import os
import warnings
import zipfile
import zlib
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from tulle.errors import CheckpointError
from tulle.whole_folder import WholeFolder

FORMAT = 2
RUN = "run.pt"
_KEYS = {"format", "model", "optimizers", "kinds", "versions", "random", "extra", "files"}
_BLOCK_BYTES = 1024 * 1024

Stamps = dict[str, tuple[int, int]]
"""Bytes and checksum (CRC-32) of files, by name."""


class Folder:
    """A checkpoint's folder.

    Args:
        path: Its name.

    Raises:
        CheckpointError: If that is no name.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        if not isinstance(path, str | os.PathLike):
            raise CheckpointError(
                f"a {type(path).__name__} was given for the checkpoint's folder, expected its name, before the model: "
                "tulle.save(path, model, optimizer), tulle.load(path, model, optimizer)"
            )
        self._whole = WholeFolder(path, RUN, "tulle.save")
        self.path, self.aside = self._whole.path, self._whole.aside

    def turn(self) -> AbstractContextManager[None]:
        """Keep others of this machine from writing to it, as those do that save a plain model on every rank."""
        return self._whole.turn()

    def prepare(self) -> None:
        """Make an empty folder aside. One rank must call it, before any writes.

        Raises:
            CheckpointError: If it cannot be made, or something of this name is there that is no checkpoint.
        """
        try:
            self._whole.prepare()
        except OSError as problem:
            raise self.unwritten(problem) from problem

    def seen(self) -> tuple[int, int] | None:
        """What tells the empty folder aside from all others, alike for all who see it; None for who sees none."""
        try:
            status = self.aside.stat()
        except OSError:
            return None
        return status.st_ino, status.st_mtime_ns

    def discard(self) -> None:
        """Remove what is aside, if anything is."""
        self._whole.discard()

    def write_run(self, run: Mapping[str, Any]) -> None:
        """Write the small file, the last of those aside."""
        with (self.aside / RUN).open("wb") as file:
            torch.save({"format": FORMAT, **run}, file)
            file.flush()
            os.fsync(file.fileno())

    def commit(self, stamps: Stamps) -> None:
        """Let what is aside be the checkpoint. One rank must call it, once all have written.

        Raises:
            CheckpointError: If a file of another rank is not there.
        """
        for name, (size_bytes, _) in stamps.items():
            if not _has_bytes(self.aside / name, size_bytes):
                raise CheckpointError(
                    f"another rank wrote {name!r} of the checkpoint {str(self.path)!r}, and rank 0 does not see it: "
                    "give a path on a file system that all ranks share"
                )
        self._whole.commit()

    def unwritten(self, problem: BaseException) -> CheckpointError:
        """What to raise if the checkpoint cannot be written."""
        cause = problem.__context__  # of a full disk torch's writer says that it is where it did not expect to be
        said = cause if isinstance(cause, OSError) else problem
        return CheckpointError(
            f"cannot write the checkpoint {str(self.path)!r}: {said}; an older one of that name is as it was"
        )

    def unread(self, problem: BaseException) -> CheckpointError:
        """What to raise if the system does not let a rank read a file."""
        return CheckpointError(f"cannot read the checkpoint {str(self.path)!r}: {problem}")

    def read_run(self) -> dict[str, Any]:
        """Read the small file.

        Raises:
            CheckpointError: If there is none, or it is damaged, or not a checkpoint's.
        """
        self.path = self._whole.found
        if not (self.path / RUN).is_file():
            raise CheckpointError(
                f"there is no checkpoint {str(self.path)!r}: give the folder that tulle.save wrote, on a file system "
                "that every rank can read"
            )
        try:
            with zipfile.ZipFile(self.path / RUN) as archive:  # torch writes checksums and does not read them
                damaged = archive.testzip()
            if damaged is not None:
                raise zipfile.BadZipFile(f"the checksum of {damaged} is wrong")
            with warnings.catch_warnings():  # what is sparse in here is small, whatever torch 2.15 says of large ones
                warnings.filterwarnings("ignore", message="Validating sparse tensor invariants")
                run = torch.load(self.path / RUN, map_location="cpu", weights_only=True)
        except Exception as problem:  # a damaged file can make the reader raise anything
            said = [*str(problem).splitlines(), type(problem).__name__][0]
            raise self.damaged(RUN, f"the reader said: {said}") from problem
        if not isinstance(run, dict) or run.get("format") != FORMAT or _KEYS - set(run):
            found = run.get("format") if isinstance(run, dict) else type(run).__name__
            raise CheckpointError(
                f"{str(self.path)!r} has format {found!r}, expected {FORMAT}, as tulle.save writes it"
            )
        return run

    def check(self, stamps: Stamps, *, rank: int, size: int) -> None:
        """Compare this rank's share of the files with their checksums, and all files with their sizes.

        Raises:
            CheckpointError: If one is absent or damaged.
        """
        for number, (name, (size_bytes, checksum)) in enumerate(sorted(stamps.items())):
            if not _has_bytes(self.path / name, size_bytes):
                raise self.damaged(name, f"expected {size_bytes:,} bytes")
            if number % size == rank and _checksum(self.path / name) != checksum:
                raise self.damaged(name, "its checksum is wrong")

    def damaged(self, name: str, cause: str) -> CheckpointError:
        """What to raise about a file of the checkpoint."""
        path = self.path / name
        found = f"{path.stat().st_size:,} bytes" if path.is_file() else "absent"
        return CheckpointError(
            f"{name} ({found}) of {str(self.path)!r} is damaged, or not a checkpoint's: take an older one; {cause}"
        )


def stamps_of(folder: Path, names: Iterable[str]) -> Stamps:
    """Sizes and checksums of files that were just written."""
    return {name: ((folder / name).stat().st_size, _checksum(folder / name)) for name in names}


def _checksum(path: Path) -> int:
    checksum = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            checksum = zlib.crc32(block, checksum)
    return checksum


def _has_bytes(path: Path, size_bytes: int) -> bool:
    return path.is_file() and path.stat().st_size == size_bytes
