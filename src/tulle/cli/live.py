"""The two views of a run: a live table on a terminal, plain lines anywhere else."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from itertools import islice

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from tulle.cli.progress import RankProgress, RunProgress
from tulle.report import quantity

_STATUS_PERIOD_S = 10.0
_MOST_RANKS = 16


class LiveView:
    """A table of the ranks under a progress bar; what rank 0 writes appears above.

    Args:
        console: The terminal.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[numbers]}"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
            console=console,
        )
        self._task = self._bar.add_task("starting", total=None, numbers="", left="")
        self._live = Live(self._bar, console=console, auto_refresh=False, transient=True)
        self._live.start()

    def show_line(self, line: str) -> None:
        """Show a line that rank 0 wrote, above the table."""
        self._live.console.print(Text.from_ansi(line), soft_wrap=True)

    def show_progress(self, progress: RunProgress) -> None:
        """Draw bar and table anew."""
        if progress.ranks:
            total = progress.total_steps
            of_total = f" of {total:,}" if total else ""
            self._bar.update(
                self._task,
                description=f"step {progress.step:,}{of_total}",
                total=total,
                completed=progress.step,
                numbers=_numbers(progress),
            )
            left_s = self._bar.tasks[self._task].time_remaining
            self._bar.update(self._task, left=f"{quantity.duration(left_s)} left" if left_s else "")
        table = rank_table(progress, room=self._console.height - 8) if progress.ranks else Text()
        self._live.update(Group(self._bar, table), refresh=True)

    def close(self) -> None:
        """Take the table away; the summary follows in its place."""
        self._live.stop()


class PlainView:
    """Passes rank 0's lines on, and says every ten seconds how far the run is.

    Args:
        output: Where rank 0's lines go.
        status: Where the status lines go.
    """

    def __init__(self, output: Console, status: Console) -> None:
        self._output = output
        self._status = status
        self._next_s = time.monotonic() + _STATUS_PERIOD_S

    def show_line(self, line: str) -> None:
        """Pass on a line that rank 0 wrote."""
        with suppress(BrokenPipeError):  # who read it has left, as `head` does; the run goes on
            print(line, file=self._output.file, flush=True)

    def show_progress(self, progress: RunProgress) -> None:
        """Print the status line when ten seconds have gone by."""
        now_s = time.monotonic()
        if now_s >= self._next_s and progress.ranks:
            self._next_s = now_s + _STATUS_PERIOD_S  # from now: what is overdue, as ranks start, is one line
            print(status_line(progress), file=self._status.file, flush=True)

    def close(self) -> None:
        """Nothing is left on the terminal."""


def status_line(progress: RunProgress) -> str:
    """How far the run is, in one line."""
    of_total = f" of {progress.total_steps:,}" if progress.total_steps else ""
    numbers = _numbers(progress)
    return f"[tulle] step {progress.step:,}{of_total}" + (f" · {numbers}" if numbers else "")


def _numbers(progress: RunProgress) -> str:
    parts = []
    if progress.loss is not None:
        parts.append(f"loss {quantity.decimal(progress.loss)}")
    if progress.tokens_per_s is not None:
        parts.append(f"{quantity.count(progress.tokens_per_s)} tokens/s")
    return " · ".join(parts)


def rank_table(progress: RunProgress, *, room: int = _MOST_RANKS) -> Table:
    """One row a rank, as many as there is room for.

    Args:
        progress: The ranks' numbers, at least one rank.
        room: Number of rows on the terminal.
    """
    table = Table(box=None, padding=(0, 2), header_style="bold")
    for heading in ("rank", "step", "loss", "tokens/s", "sent/step", "waiting"):
        table.add_column(heading, justify="right")
    shown = max(1, min(_MOST_RANKS, room))
    for rank, numbers in islice(progress.ranks.items(), shown):
        table.add_row(str(rank), *_row(numbers))
    if (left_out := len(progress.ranks) - shown) > 0:
        table.add_row(f"+{left_out}", "…", style="dim")
    return table


def _row(numbers: RankProgress) -> list[str]:
    return [
        f"{numbers.step:,}",
        _shown(numbers.loss, quantity.decimal),
        _shown(numbers.tokens_per_s, quantity.count),
        _shown(numbers.bytes_per_step, quantity.size),
        _shown(numbers.wait_share, quantity.share),
    ]


def _shown(value: float | None, write: Callable[[float], str]) -> str:
    return quantity.MISSING if value is None else write(value)
