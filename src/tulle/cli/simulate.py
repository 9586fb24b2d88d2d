"""`tulle simulate`: what a plan would do on a cluster that you do not have."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

import tulle.cli.units as units
from tulle.cli.console import console, show, waiting
from tulle.cli.rank import write_json
from tulle.cli.scaling import Job, describe, describe_tables, load, points_table, tables_table
from tulle.cli.units import Bandwidth, Hosts, Latency, Lookahead, ProcessesPerHost, changed
from tulle.cli.usage import UsageError
from tulle.report.forecast import write_forecast
from tulle.report.quantity import plural
from tulle.simulate import Change, Noise, Point, Stragglers, Weather, changes, telling_ranks, trace

_SWEPT: dict[str, tuple[str, Callable[[str], float]]] = {
    "hosts": ("hosts", lambda text: units.whole(text, "--sweep hosts")),
    "processes-per-host": ("processes_per_host", lambda text: units.whole(text, "--sweep processes-per-host")),
    "bandwidth": ("bandwidth_bytes_per_s", lambda text: units.bandwidth(text, "--sweep bandwidth")),
    "latency": ("latency_s", lambda text: units.duration(text, "--sweep latency")),
}
"""By the name on the command line: the field of a `Change`, and how its values are read."""


PlanFile = Annotated[Path, typer.Argument(metavar="PLAN", help="As tulle plan or Plan.save wrote it.")]
ProfileFile = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Default: the one that PLAN names, or profile.json beside it.")
]
InsideBandwidth = Annotated[
    str | None, typer.Option(metavar="RATE", help="From one rank to others of its host: 300GB/s.")
]
Sweep = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME=A,B", help="hosts=1,4,25, say, or of processes-per-host, bandwidth, latency."),
]
NoiseOption = Annotated[
    float | None, typer.Option(metavar="C", min=0, help="Coefficient of variation of a rank's computation: 0.05.")
]
StragglersOption = Annotated[
    str | None, typer.Option(metavar="SHARE:BY", help="Share of slow ranks, and by what factor: 0.01:1.5.")
]
Steps = Annotated[int, typer.Option(metavar="N", min=1, help="Steps that are simulated with noise.")]
Seed = Annotated[int, typer.Option(metavar="N", min=0, help="Of noise and stragglers.")]
Batch = Annotated[
    int | None, typer.Option(metavar="N", min=1, help="Samples of a step on the first cluster, of all ranks.")
]
Strong = Annotated[
    bool, typer.Option("--strong", metavar="", help="The same batch on all clusters, not as much a rank.")
]
Replan = Annotated[bool, typer.Option("--replan", metavar="", help="On each cluster the plan that is best there.")]
Out = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Write forecast.json, timeline.json and forecast.html there.")
]
AsJson = Annotated[bool, typer.Option("--json", metavar="", help="Print one JSON object and nothing else.")]


def simulate(  # noqa: PLR0913 - typer makes each argument an option
    plan: PlanFile,
    profile: ProfileFile = None,
    hosts: Hosts = None,
    processes_per_host: ProcessesPerHost = None,
    bandwidth: Bandwidth = None,
    latency: Latency = None,
    inside_bandwidth: InsideBandwidth = None,
    sweep: Sweep = None,
    noise: NoiseOption = None,
    stragglers: StragglersOption = None,
    steps: Steps = 20,
    seed: Seed = 0,
    batch: Batch = None,
    strong: Strong = False,
    replan: Replan = False,
    lookahead: Lookahead = None,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Simulate a plan on a cluster that you do not have, or on one after the other.

    Example: tulle simulate plan.json --hosts 300 --processes-per-host 4 --bandwidth 100Gbit --latency 2us

    Axis data of the plan's mesh takes all ranks that the other axes leave. What is not given is as it was
    profiled. timeline.json is for ui.perfetto.dev.
    """
    job = Job(*load(plan, profile), strong, batch, replan, lookahead)
    change = changed(hosts, processes_per_host, bandwidth, latency, inside_bandwidth)
    weather = _weather(noise, stragglers, steps, seed)
    clusters = _clusters(change, sweep or ())
    units.tell_of_unknown_links(job.profile.cluster, clusters)
    with waiting(f"simulating {plural(len(clusters), 'cluster')}"):
        points = job.over(clusters, weather)
    found = _found(plan, job, points, weather)
    if out is not None:
        _write(out, found, trace(points[-1].forecast, telling_ranks(points[-1].forecast)))
    if as_json:
        print(json.dumps(found))
    else:
        _show(found, out)


def _weather(noise: float | None, stragglers: str | None, steps: int, seed: int) -> Weather:
    """What disturbs the ranks."""
    slow = None if stragglers is None else Stragglers(*units.share_and_factor(stragglers, "--stragglers"))
    return Weather(Noise(noise) if noise else None, slow, steps, seed)


def _clusters(change: Change, sweep: Sequence[str]) -> list[Change]:
    """All clusters that a sweep goes over, in all else as one change says."""
    swept = _swept(sweep)
    for name, (of_change, _) in _SWEPT.items():
        if of_change in swept and getattr(change, of_change) is not None:
            raise UsageError(f"--{name} is given, and --sweep {name}=...: give one of them")
    return changes(change, swept)


def _found(plan: Path, job: Job, points: Sequence[Point], weather: Weather) -> dict[str, Any]:
    """What `--json` prints, and the page draws."""
    return {
        "plan": str(plan),
        "model": job.profile.model,
        "scaling": "strong" if job.is_strong else "weak",
        "lookahead": job.looks_ahead,
        "splits_tables": any(task.kind == "rows" for point in points for task in point.forecast.step.tasks),
        "points": describe(job, points, weather.stragglers),
        "tables": describe_tables(job, points[-1]),
    }


def _swept(texts: Sequence[str]) -> dict[str, list[Any]]:
    """Values of fields of a `Change`, by name."""
    found = dict(map(_values, texts))
    if len(found) < len(texts):
        raise UsageError(f"--sweep is given twice for one name: {', '.join(texts)}")
    return found


def _values(text: str) -> tuple[str, list[Any]]:
    """A field of a `Change`, and its values."""
    name, _, values = text.partition("=")
    if name not in _SWEPT or not values:
        raise UsageError(f"--sweep {text!r}: expected NAME=A,B,... with a name of {', '.join(_SWEPT)}")
    field, read = _SWEPT[name]
    return field, [read(value) for value in values.split(",")]


def _write(out: Path, found: dict[str, Any], timeline: dict[str, Any]) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
        write_json(out / "forecast.json", found)
        write_json(out / "timeline.json", timeline, indent=None)
    except OSError as error:
        raise UsageError(f"--out {str(out)!r} cannot be written: {error.strerror}") from error
    write_forecast(found, timeline, out / "forecast.html")


def _show(found: dict[str, Any], out: Path | None) -> None:
    screen = console()
    show(screen, points_table(found))
    if found["tables"]:
        screen.print()
        show(screen, tables_table(found["tables"]))
    if out is not None:
        screen.print(f"\n{out / 'forecast.html'}; timeline.json is for ui.perfetto.dev")
