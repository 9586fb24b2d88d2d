"""`console`: where commands print, of which nothing is cut where no terminal asks for it."""

from __future__ import annotations

import os

from rich.console import Console

_WIDE = 240


def console(*, stderr: bool = False) -> Console:
    """A console that wraps no line; in a file or a pipe, where rich takes 80 columns, tables have their own width."""
    made = Console(stderr=stderr, highlight=False, soft_wrap=True)
    if not made.is_terminal and "COLUMNS" not in os.environ:
        made.width = _WIDE
    return made
