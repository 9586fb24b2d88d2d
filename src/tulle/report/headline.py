"""The head of the page: what ran, and its key figures."""

import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC
from pathlib import Path

import numpy as np

import tulle.report.quantity as quantity
from tulle.report.records import Run
from tulle.report.series import mean_over_ranks, median, over_ranks, steps_of, warmed_up
from tulle.report.summary import LAST_STEPS, summarize_run

HOSTS_NAMED = 4


@dataclass(frozen=True, slots=True)
class Headline:
    """What ran, in the pieces of one sentence."""

    name: str
    folder: str
    command: str
    where: str
    mesh: str
    versions: str
    started: str
    progress: str


@dataclass(frozen=True, slots=True)
class KeyFigure:
    """One number that a reader looks for first."""

    label: str
    value: str
    note: str


def headline(run: Run) -> Headline:
    """Return what ran: command, processes, hosts, mesh, versions and date, as far as they were recorded."""
    launch, mesh = run.launch, run.mesh
    versions = [
        f"{name.capitalize() if name == 'python' else name} {launch.versions[name]}" for name in launch.versions
    ]
    return Headline(
        name=run.folder.resolve().name,
        folder=shlex.quote(short(run.folder)),
        command=shlex.join(launch.command),
        where=_where(run),
        mesh="" if mesh is None else f"{_axes(mesh.axes)} ({mesh.backend}, {mesh.device})",
        versions=", ".join(versions),
        started=launch.started.astimezone(UTC).strftime("%-d %B %Y, %H:%M UTC") if launch.started else "",
        progress=_progress(run),
    )


def short(path: Path) -> str:
    """A path as the person at the terminal would type it: relative if it lies below the current folder."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def _where(run: Run) -> str:
    hosts = run.launch.hosts
    words = quantity.plural(run.processes, "process")
    if len(hosts) == 1:
        words += f" on {hosts[0]}"
    elif hosts:
        named = ", ".join(hosts[:HOSTS_NAMED]) + (", …" if len(hosts) > HOSTS_NAMED else "")
        words += f" on {quantity.plural(len(hosts), 'host')} ({named})"
    return words + (f" with {quantity.plural(run.launch.cores, 'core')}" if run.launch.cores else "")


def _axes(axes: Mapping[str, int]) -> str:
    return " × ".join(f"{name}={size}" for name, size in axes.items())


def _progress(run: Run) -> str:
    steps = steps_of(run)
    if len(steps) == 0:
        return "It recorded no step."
    planned = np.array([log.total_steps[-1] for log in run.ranks if len(log.steps)])
    planned = planned[np.isfinite(planned)]
    if len(planned) and planned.max() > steps[-1]:
        return f"It stopped after step {steps[-1]:,} of {planned.max():,.0f}."
    if steps[0] > 1:  # it went on from a checkpoint, and what was before is in the record of another run
        return f"It trained steps {steps[0]:,} to {steps[-1]:,}."
    return f"It trained {quantity.plural(int(steps[-1]), 'step')}."


def key_figures(run: Run) -> tuple[KeyFigure, ...]:
    """Return the key figures that were recorded."""
    summary = summarize_run(run)
    step_s = median(warmed_up(mean_over_ranks(over_ranks(run, lambda log: log.step_s))))
    memory = over_ranks(run, lambda log: log.memory_peak_bytes)
    peak_bytes = float(np.nanmax(memory)) if np.isfinite(memory).any() else math.nan
    ranks = "one rank" if run.processes == 1 else f"{run.processes:,} ranks together"
    figures = []
    if "loss" in summary:
        loss = "not finite" if summary["loss"] is None else quantity.decimal(summary["loss"])
        last = min(LAST_STEPS, len(steps_of(run)))
        figures.append(
            KeyFigure("Final loss", loss, f"mean of the last {last} steps" if last > 1 else "of the last step")
        )
    if summary.get("bleu") is not None:
        figures.append(KeyFigure("BLEU", quantity.decimal(round(float(summary["bleu"] or 0), 2)), "as logged last"))
    shown = (
        ("Tokens a second", "tokens_per_s", quantity.rate, ranks),
        ("Bytes sent", "bytes_sent_per_step", quantity.size, "a rank and step, median"),
        ("Waiting", "wait_share", quantity.share, "of the step, for communication"),
    )
    for label, name, write, note in shown:
        value = summary.get(name)
        if value is not None:
            figures.append(KeyFigure(label, write(value), note))
    if math.isfinite(step_s):
        figures.append(KeyFigure("Step time", quantity.duration(step_s), "median"))
    if math.isfinite(peak_bytes):
        figures.append(KeyFigure("Peak memory", quantity.size(peak_bytes), "of the largest rank"))
    if summary.get("seconds"):
        figures.append(KeyFigure("Training time", quantity.duration(float(summary["seconds"] or 0)), "all steps"))
    return tuple(figures)


def links(run: Run) -> str:
    """Return the measured network of each axis in words, or the one by which the plan chose; empty if neither."""
    network = {f"axis {axis}": link for axis, link in run.mesh.network.items()} if run.mesh else {}
    if not network and run.plan and run.plan.network:
        network = {"axis data": run.plan.network}
    return "; ".join(
        f"{axis}: {quantity.duration(link.latency_s)} latency, {quantity.size(link.bandwidth_bytes_per_s)}/s"
        for axis, link in network.items()
    )
