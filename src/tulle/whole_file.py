"""`write_whole`: a file that is complete or absent, whoever reads it when."""

from __future__ import annotations

import errno
import os
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write a text file aside, then rename it: a reader finds all of it, or what was there before.

    Raises:
        OSError: If it cannot be written, or is a folder; nothing is left aside then.
    """
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        aside.write_text(text, encoding="utf-8")
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
