"""`write_whole`: a file that is complete or absent, whoever reads it when."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write a text file aside, then rename it: a reader finds all of it, or what was there before."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.write_text(text, encoding="utf-8")
    aside.replace(path)
