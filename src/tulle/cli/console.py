"""`console`: where commands print, of which nothing is cut where no terminal asks for it, and where they wait."""

from __future__ import annotations

import os

from rich.cells import cell_len
from rich.console import Console
from rich.measure import Measurement
from rich.status import Status
from rich.table import Table

_WIDE = 240


def console(*, stderr: bool = False) -> Console:
    """A console that wraps no line; in a file or a pipe, where rich takes 80 columns, tables have their own width."""
    made = Console(stderr=stderr, highlight=False, soft_wrap=True)
    if not made.is_terminal and "COLUMNS" not in os.environ:
        made.width = _WIDE
    return made


def waiting(for_what: str) -> Status:
    """What a terminal shows while something takes its time, `with` it; a file or a pipe has nothing of it."""
    return console(stderr=True).status(for_what)


def show(screen: Console, table: Table) -> None:
    """Print a table no narrower than its words and numbers: a terminal that is wraps lines, and no number is cut."""
    for column in table.columns:
        if column.no_wrap:
            column.min_width = max(cell_len(str(cell)) for cell in (column.header, *column.cells))
    width = screen.width
    screen.width = max(width, Measurement.get(screen, screen.options.update(max_width=_WIDE), table).minimum)
    screen.print(table)
    screen.width = width
