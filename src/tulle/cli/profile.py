"""`tulle profile`: some steps of a script, and then what its modules take, and its tables' gradients look like."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tulle.cli.finish import Finished
from tulle.cli.options import Split
from tulle.cli.run import RunOptions, run
from tulle.distribute import OBSERVE_EVERY
from tulle.profiling import PROFILE
from tulle.record import STOP_AFTER
from tulle.report import quantity
from tulle.report.characteristics import ObservedTable, observed_tables
from tulle.report.records import Candidate, Measured
from tulle.workload import ModuleProfile, Profile

NAME = "profile.json"
_CANDIDATES_SHOWN = 3
_MODULES_SHOWN = 12
_NO_TABLES = (
    "No table's gradient was observed. They are when tulle.distribute has put a model with sparse gradients, "
    "nn.Embedding(..., sparse=True), on several processes, and it has trained a step."
)
_ONE_PROCESS = "One process has nobody to synchronize with, so there was nothing to observe: add --processes 4."
NO_PROFILE = (
    "No profile was made. It is when tulle.distribute was given a model that is then called in training mode, and "
    "its optimizer has stepped a few times."
)


def profile(split: Split, options: RunOptions, *, every: int, steps: int) -> int:
    """Run a script for some steps, show what was observed, and return the exit code of the command.

    The profile of its model, `profile.json` in the run folder, is what plans and forecasts rest on.

    Args:
        split: The command line.
        options: Those that it shares with `tulle run`.
        every: Observe every so many steps.
        steps: End the script after so many.

    Raises:
        UsageError: Before anything is started, if the options do not fit.
        CommunicationError: If the machines did not find each other.
    """
    settings = {OBSERVE_EVERY: str(min(every, steps)), STOP_AFTER: str(steps), PROFILE: NAME}
    return run(split, options, settings=settings, show=_show, more=_more)


def _show(finished: Finished) -> RenderableType:
    path = finished.run / NAME
    shown: list[RenderableType] = [modules_table(Profile.load(path)) if path.exists() else Text(NO_PROFILE), Text()]
    tables = observed_tables(finished.record) if finished.record else ()
    if not tables:
        return Group(*shown, Text(_ONE_PROCESS if finished.summary.get("processes") == 1 else _NO_TABLES))
    return Group(*shown, looks_table(tables), Text(), costs_table(tables))


def _more(run: Path) -> dict[str, object]:
    """For `--json`: where the profile is, and what it says of the step."""
    path = run / NAME
    if not path.exists():
        return {"profile": None}
    found = Profile.load(path)
    modules = [
        {"name": one.name, "forward_s": one.forward_s, "backward_s": one.backward_s, "flop": one.flop}
        for one in found.modules
    ]
    told = {"step_s": found.step_s, "peak_bytes": found.peak_bytes, "lookahead": found.lookahead}
    return {"profile": str(path), **told, "modules": modules}


def modules_table(profile: Profile) -> Table:
    """The pieces of a model that take most of a step, in the order in which they run."""
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
    table.add_column("module", overflow="fold")
    for heading in ("forward", "backward", "share", "parameters", "activations", "Gflop/s"):
        table.add_column(heading, justify="right")
    shown = sorted(profile.modules, key=_seconds, reverse=True)[:_MODULES_SHOWN]
    others = [module for module in profile.modules if module not in shown]
    for module in (module for module in profile.modules if module in shown):
        table.add_row(Text(module.name or profile.model), *_cells([module], profile.step_s))
    if others:
        table.add_row(f"{quantity.plural(len(others), 'other')}", *_cells(others, profile.step_s), style="dim")
    update_s = max(0.0, profile.step_s - sum(map(_seconds, profile.modules)))
    table.add_row("optimizer", "", "", quantity.share(update_s / profile.step_s), style="dim")
    step, memory = quantity.duration(profile.step_s), quantity.size(profile.peak_bytes)
    seen = "\nThe loop goes through tulle.lookahead." if profile.lookahead else ""
    table.caption = f"Of a step of {step} without communication, which needs {memory}; all processes at once.{seen}"
    table.caption_justify = "left"
    return table


def _seconds(module: ModuleProfile) -> float:
    return module.forward_s + module.backward_s


def _cells(modules: Sequence[ModuleProfile], step_s: float) -> list[str]:
    forward_s, backward_s = sum(one.forward_s for one in modules), sum(one.backward_s for one in modules)
    flop = sum(one.flop for one in modules)
    return [
        quantity.duration(forward_s),
        quantity.duration(backward_s),
        quantity.share((forward_s + backward_s) / step_s),
        quantity.size(sum(one.parameters_bytes for one in modules)),
        quantity.size(sum(one.activations_bytes for one in modules)),
        quantity.decimal(flop / forward_s / 1e9) if flop and forward_s else quantity.MISSING,
    ]


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
