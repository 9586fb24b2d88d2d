"""`tulle explain`: what a plan decides and why; after a run, predicted beside measured, part by part."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from tulle.errors import PlanError
from tulle.plan import Plan, Prediction
from tulle.report import quantity, read
from tulle.report.records import Run
from tulle.report.series import median, over_ranks, parts_of_step, warmed_up


@dataclass(frozen=True, slots=True)
class Compared:
    """A part of a step, seconds; None where it was not predicted."""

    part: str
    predicted_s: float | None
    measured_s: float

    @property
    def error(self) -> float | None:
        """By how much the prediction is off, of what was measured."""
        if self.predicted_s is None or not self.measured_s > 0:
            return None
        return self.predicted_s / self.measured_s - 1


def compared(prediction: Prediction, run: Run) -> list[Compared]:
    """The parts of a step, predicted and measured: medians over the steps of means over the ranks.

    Args:
        prediction: Of the plan.
        run: Of a training under it.
    """
    step = over_ranks(run, lambda log: log.step_s)
    parts = dict(parts_of_step(run).items())
    measured = {name: _typical_s(matrix) for name, matrix in parts.items()}
    found = [Compared(name, prediction.parts_s.get(name), seconds) for name, seconds in measured.items()]
    return [*found, Compared("step", prediction.step_s, _typical_s(step))]


def explain(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="As tulle plan or Plan.save wrote it.")],
    measured: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Folder of a run under this plan, to compare with.")
    ] = None,
    against: Annotated[Path | None, typer.Option(metavar="PLAN", help="Say what this other plan does instead.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", metavar="", help="Print one JSON object and nothing else.")
    ] = False,
) -> None:
    """Say what a plan decides, why, and what would change it; and whether a run went as predicted.

    Example: tulle explain plan.json --measured runs/demo
    """
    loaded = Plan.load(plan)
    differences = loaded.diff(Plan.load(against)) if against else []
    found = compared(_prediction(loaded, plan), read(measured)) if measured else []
    if as_json:
        told = [asdict(one) | {"error": one.error} for one in found]
        print(json.dumps({"plan": loaded.to_json(), "measured": told, "differences": differences}))
        return
    console = Console(highlight=False, soft_wrap=True)
    console.print(loaded.explain(), markup=False)
    if found:
        console.print()
        console.print(comparison(found))
    for line in differences:
        console.print(f"differs: {line}", markup=False)


def comparison(found: list[Compared]) -> Table:
    """One row a part."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("part of a step")
    for heading in ("predicted", "measured", "error"):
        table.add_column(heading, justify="right")
    for one in found:
        table.add_row(
            one.part,
            quantity.MISSING if one.predicted_s is None else quantity.duration(one.predicted_s),
            quantity.duration(one.measured_s),
            quantity.MISSING if one.error is None else f"{one.error:+.0%}",
        )
    return table


def _prediction(plan: Plan, path: Path) -> Prediction:
    if plan.prediction is None:
        raise PlanError(
            f"{str(path)!r} has no prediction to compare with: only a plan made of a profile has one, by tulle plan"
        )
    return plan.prediction


def _typical_s(matrix: np.ndarray) -> float:
    recorded = warmed_up(matrix)
    return median(np.nanmean(recorded, axis=0)) if recorded.size else float("nan")
