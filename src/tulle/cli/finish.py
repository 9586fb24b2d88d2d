"""What the launcher makes of a run folder after the ranks have ended: summary, timeline and report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from tulle.cli.rank import write_json
from tulle.cli.timeline import merge
from tulle.errors import TulleError
from tulle.report import Run, quantity, read, summarize, write

Summary = Mapping[str, int | float | dict[str, dict[str, object]] | None]

_NO_STEPS = "No steps were recorded: tulle.distribute and optimizer.step make them, or else tulle.log(loss=loss)."
_HEADINGS = {
    "processes": ("processes", quantity.count),
    "steps": ("steps", quantity.count),
    "loss": ("loss", quantity.decimal),
    "tokens_per_s": ("tokens a second, all ranks", quantity.count),
    "bytes_sent_per_step": ("sent a step, each rank", quantity.size),
    "wait_share": ("share of the steps spent waiting", quantity.share),
    "seconds": ("time in steps", quantity.duration),
    "tokens": ("tokens", quantity.count),
}


@dataclass(frozen=True, slots=True)
class Finished:
    """What was written into the run folder.

    Args:
        run: The folder.
        record: What the ranks recorded, None if it cannot be read.
        summary: The numbers of `summary.json`.
        report: The page, None if it could not be drawn.
        timeline: The merged timeline, None if none was recorded.
        note: What could not be written and how to mend that, empty if all was.
    """

    run: Path
    record: Run | None
    summary: Summary
    report: Path | None
    timeline: Path | None
    note: str = ""


def finish(run: Path, *, compare: Path | None = None) -> Finished:
    """Write `summary.json`, `timeline.json` and `report.html` of a run, whether it went well or not.

    Args:
        run: The run folder.
        compare: Another run's folder, drawn into the same report.
    """
    merged = merge(run)
    try:
        record = read(run)
    except TulleError as error:
        return Finished(run, None, {}, None, merged, f"no summary: {error}")
    summary = summarize(record)
    write_json(run / "summary.json", summary)
    try:
        note = "" if summary["steps"] else _NO_STEPS
        return Finished(run, record, summary, write(record, compare=compare), merged, note)
    except Exception as error:  # training that went well stays so, whatever becomes of its picture
        return Finished(run, record, summary, None, merged, f"no report: {type(error).__name__}: {error}")


def summary_table(finished: Finished) -> Table:
    """The summary's numbers as a table; those that the script logged come last, under their names."""
    summary = finished.summary
    table = Table(box=None, show_header=False, padding=(0, 2))
    table.add_column(style="dim")
    table.add_column(justify="right")
    for name in [*_HEADINGS, *(name for name in summary if name not in _HEADINGS)]:
        value = summary.get(name)
        if name in summary and not isinstance(value, dict):
            heading, write_value = _HEADINGS.get(name, (name, quantity.decimal))
            table.add_row(heading, "not finite" if value is None else write_value(value))
    return table
