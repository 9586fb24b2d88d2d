"""`tulle profile`: some steps of a script, and then what its tables' gradients look like and what each scheme costs."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tulle.cli.finish import Finished
from tulle.cli.options import Split
from tulle.cli.run import RunOptions, run
from tulle.distribute import OBSERVE_EVERY
from tulle.record import STOP_AFTER
from tulle.report import quantity, read
from tulle.report.characteristics import ObservedTable, observed_tables
from tulle.report.records import Candidate, Measured

_CANDIDATES_SHOWN = 3
_NO_TABLES = (
    "No table's gradient was observed. They are when tulle.distribute has put a model with sparse gradients, "
    "nn.Embedding(..., sparse=True), on several processes, and it has trained a step."
)
_ONE_PROCESS = "One process has nobody to synchronize with, so there was nothing to observe: add --processes 4."


def profile(split: Split, options: RunOptions, *, every: int, steps: int) -> int:
    """Run a script for some steps, show what was observed, and return the exit code of the command.

    Args:
        split: The command line.
        options: Those that it shares with `tulle run`.
        every: Observe every so many steps.
        steps: End the script after so many.

    Raises:
        UsageError: Before anything is started, if the options do not fit.
        CommunicationError: If the machines did not find each other.
    """
    settings = {OBSERVE_EVERY: str(min(every, steps)), STOP_AFTER: str(steps)}
    return run(split, options, settings=settings, show=_show)


def _show(finished: Finished) -> RenderableType:
    tables = observed_tables(read(finished.run))
    if not tables:
        return Text(_ONE_PROCESS if finished.summary.get("processes") == 1 else _NO_TABLES)
    return Group(looks_table(tables), Text(), costs_table(tables))


def looks_table(tables: Sequence[ObservedTable]) -> Table:
    """The characteristics: one row a table."""
    ranks = max(table.ranks for table in tables)
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
    table.add_column("table", overflow="fold")
    for heading in (
        "rows x width",
        "density",
        "overlap",
        f"densification\nat {quantity.plural(ranks, 'rank')}",
        "skewness",
    ):
        table.add_column(heading, justify="right")
    for one in tables:
        looks = one.characteristics
        table.add_row(
            Text(one.name),
            f"{one.rows:,} x {one.width:,}",
            _range(one),
            quantity.share(looks.overlap_ratio),
            quantity.ratio(looks.densification_ratio),
            quantity.ratio(looks.skewness_ratio),
        )
    return table


def costs_table(tables: Sequence[ObservedTable]) -> Table:
    """What synchronizing takes: below each table the scheme in force and the best others, for one rank and step."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("table and schemes", overflow="fold")
    for heading in ("predicted\ntime", "measured\ntime", "predicted\nsent", "measured\nsent"):
        table.add_column(heading, justify="right")
    for one in tables:
        table.add_row(Text(one.name))
        for candidate in _best(one):
            in_force = candidate.scheme == one.scheme
            table.add_row(
                f"{'●' if in_force else ' '} {candidate.scheme}",
                *_costs(candidate, one.measured.get(candidate.scheme)),
                style="" if in_force else "dim",
            )
    table.caption = (
        "● in force, then the best others by predicted time; medians of a rank and step.\n"
        "Measured time: of the message in which the table travelled, waits included."
    )
    table.caption_justify = "left"
    return table


def _best(table: ObservedTable) -> list[Candidate]:
    """The scheme in force first, then the cheapest others."""
    in_force = table.predicted or Candidate(table.scheme, *[float("nan")] * 3)
    others = [one for one in table.candidates if one.scheme != table.scheme]
    return [in_force, *others[: _CANDIDATES_SHOWN - 1]]


def _costs(predicted: Candidate, measured: Measured | None) -> list[str]:
    return [
        quantity.duration(predicted.seconds),
        quantity.MISSING if measured is None else quantity.duration(measured.seconds),
        quantity.size(predicted.bytes),
        quantity.MISSING if measured is None else quantity.size(measured.bytes),
    ]


def _range(table: ObservedTable) -> str:
    lowest, highest = quantity.share(table.lowest_density), quantity.share(table.highest_density)
    return lowest if lowest == highest else f"{lowest} to {highest}"
