"""The few numbers that sum a run up (`summary.json`)."""

import math
from pathlib import Path

import numpy as np

from tulle.report.characteristics import observed_tables
from tulle.report.folder import read
from tulle.report.records import Run
from tulle.report.series import (
    mean_over_ranks,
    median,
    over_ranks,
    steps_of,
    sum_over_ranks,
    tokens_per_s,
    warmed_up,
)

LAST_STEPS = 10


Number = int | float | None


def summarize(run: Path | Run) -> dict[str, Number | dict[str, dict[str, object]]]:
    """Sum up a run, read already or by its folder; the launcher writes the result to `summary.json`.

    Returns:
        `processes`, `steps` (the last step's number), and where recorded: `loss` (mean of the last ten logged
        steps, each the mean over ranks), `tokens_per_s` (of all ranks, median), `bytes_sent_per_step` (of one
        rank, median), `wait_share` (of the steps' time), `seconds` (spent in steps), `tokens` (of all
        ranks) and the last value of every other number that was logged. Rates leave out the first five
        steps. A number that was logged but is not finite is None, as JSON has no such number. A logged
        number cannot take the name of one above. If gradients of tables were observed, `tables` has for each
        its characteristics, its scheme, and predicted and measured cost (`ObservedTable.as_json`).

    Raises:
        DataError: the folder is missing, holds no run, or one of its files is broken.
    """
    run = run if isinstance(run, Run) else read(run)
    tables = {table.name: table.as_json() for table in observed_tables(run)}
    return {**summarize_run(run), **({"tables": tables} if tables else {})}


def summarize_run(run: Run) -> dict[str, Number]:
    """Sum up the numbers of a run that was read already, tables left out; see `summarize`."""
    steps = steps_of(run)
    tokens = sum_over_ranks(over_ranks(run, lambda log: log.tokens))
    found: dict[str, float] = {
        "loss": last_loss(run),
        "tokens_per_s": median(warmed_up(tokens_per_s(run))),
        "bytes_sent_per_step": median(warmed_up(mean_over_ranks(over_ranks(run, lambda log: log.bytes_sent)))),
        "wait_share": wait_share(run),
        "seconds": _total(mean_over_ranks(over_ranks(run, lambda log: log.step_s))),
        "tokens": _total(tokens),
    }
    summary: dict[str, Number] = {
        "processes": run.processes,
        "steps": int(steps[-1]) if len(steps) else 0,
    }
    for name, value in (*found.items(), *last_values(run).items()):
        if not math.isnan(value) and name not in summary:
            whole = name in ("bytes_sent_per_step", "tokens")
            summary[name] = None if math.isinf(value) else round(value) if whole else value
    return summary


def last_loss(run: Run) -> float:
    """Return the mean of the last ten logged losses, each the mean over ranks; infinity if it diverged."""
    loss = mean_over_ranks(over_ranks(run, lambda log: log.loss))
    logged = loss[~np.isnan(loss)]
    return float(logged[-LAST_STEPS:].mean()) if len(logged) else math.nan


def wait_share(run: Run) -> float:
    """Return the share of the steps' time in which the ranks stood waiting for communication."""
    step_s = warmed_up(over_ranks(run, lambda log: log.step_s))
    wait_s = warmed_up(over_ranks(run, lambda log: log.wait_s))
    recorded = ~np.isnan(step_s) & ~np.isnan(wait_s)
    total_s = step_s[recorded].sum()
    return float(wait_s[recorded].sum() / total_s) if total_s > 0 else math.nan


def last_values(run: Run) -> dict[str, float]:
    """Return the last value of every number that was logged beside loss and tokens, mean over its ranks.

    A value that is not finite is infinity.
    """
    last = {}
    for name in sorted({name for log in run.ranks for name in log.values}):
        values = mean_over_ranks(over_ranks(run, lambda log, name=name: log.values.get(name)))
        logged = values[~np.isnan(values)]
        if len(logged):
            last[name] = float(logged[-1]) if math.isfinite(logged[-1]) else math.inf
    return last


def _total(series: np.ndarray) -> float:
    recorded = series[~np.isnan(series)]
    return float(recorded.sum()) if len(recorded) else math.nan
