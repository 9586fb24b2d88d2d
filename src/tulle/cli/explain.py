"""`tulle explain`: what a plan decides and why; after a run, predicted beside measured, part by part."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from functools import partial
from pathlib import Path

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from tulle.cli.console import console
from tulle.cli.finish import Finished
from tulle.cli.options import Split
from tulle.cli.plan import PlanRequest
from tulle.cli.profile import NAME, NO_PROFILE
from tulle.cli.run import RunOptions, run
from tulle.errors import PlanError
from tulle.plan import Plan, Prediction
from tulle.profiling import PROFILE
from tulle.record import STOP_AFTER
from tulle.report import quantity, read
from tulle.report.headline import short
from tulle.report.predicted import Compared, compared
from tulle.report.records import Run
from tulle.simulate import Change
from tulle.sync import AUTO
from tulle.workload import Profile

BEST = "best-plan.json"
"""In the run folder: `plan.json` there is the plan of the run."""


def explain(plan: Path, *, measured: Path | None, against: Path | None, as_json: bool) -> None:
    """Print what a plan decides, beside what a run under it measured, and another plan.

    Args:
        plan: As `tulle plan` or `Plan.save` wrote it.
        measured: Folder of a run under it.
        against: The other plan.
        as_json: Print one JSON object and nothing else.
    """
    loaded = Plan.load(plan)
    differences = loaded.diff(Plan.load(against)) if against else []
    prediction = _prediction(loaded, plan) if measured else None
    run = read(measured) if measured else None
    found = compared(prediction, run) if prediction and run else []
    otherwise = _otherwise(loaded, run) if run else []
    if as_json:
        told = [
            asdict(one) | {"measured_s": one.measured_s if math.isfinite(one.measured_s) else None, "ratio": one.ratio}
            for one in found
        ]
        named = {"plan": loaded.to_json(), "measured": told, "differences": differences, "run_differs": otherwise}
        print(json.dumps(named))
        return
    screen = console()
    screen.print(loaded.explain(), markup=False)
    if found:
        screen.print()
        screen.print(comparison(found))
    for line in otherwise:
        screen.print(f"the run was under another plan: {line}", markup=False)
    for line in differences or (["nothing"] if against else []):
        screen.print(f"differs: {line}", markup=False)


def _otherwise(plan: Plan, run: Run) -> list[str]:
    """What a run did otherwise than a plan says, but for what that leaves to the run."""
    ran = run.plan.whole if run.plan else None
    return [line for line in plan.diff(ran) if f": {AUTO} against " not in line] if ran else []


def explain_script(split: Split, options: RunOptions, *, steps: int, against: Path | None) -> int:
    """Run some steps of a script, plan by its profile, say what was chosen, and return the exit code of the command.

    Args:
        split: The command line.
        options: Those that it shares with `tulle run`.
        steps: End the script after so many.
        against: A plan to compare with.
    """
    other = Plan.load(against) if against else None
    settings = {STOP_AFTER: str(steps), PROFILE: NAME}
    return run(split, options, settings=settings, show=partial(_shown, other), more=partial(_told, other))


def _planned(folder: Path) -> Plan | None:
    """The best plan for the profile in a run folder; it is kept there too."""
    path = folder / NAME
    if not path.exists():
        return None
    profile = Profile.load(path)
    found = PlanRequest(Change()).plan(profile, is_anew=True)
    found.save(folder / BEST, profile=path, model=profile.model)
    return found


def _shown(against: Plan | None, finished: Finished) -> RenderableType:
    found = _planned(finished.run)
    if found is None:
        return Text(NO_PROFILE)
    lines = [f"differs: {line}" for line in (found.diff(against) if against else [])]
    return Text("\n".join([found.explain(), *lines, f"kept: {short(finished.run / BEST)}"]))


def _told(against: Plan | None, folder: Path) -> dict[str, object]:
    """For `--json`."""
    found = _planned(folder)
    if found is None:
        return {"plan": None}
    return {"plan": found.to_json(), "differences": found.diff(against) if against else []}


def comparison(found: list[Compared]) -> Table:
    """One row a part."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("part of a step")
    for heading in ("predicted", "measured", "ratio"):
        table.add_column(heading, justify="right")
    for one in found:
        table.add_row(
            one.part,
            quantity.MISSING if one.predicted_s is None else quantity.duration(one.predicted_s),
            quantity.duration(one.measured_s),
            quantity.MISSING if one.ratio is None else quantity.ratio(one.ratio),
        )
    return table


def _prediction(plan: Plan, path: Path) -> Prediction:
    if plan.prediction is None:
        raise PlanError(
            f"{str(path)!r} has no prediction to compare with: only a plan made of a profile has one, by tulle plan"
        )
    return plan.prediction
