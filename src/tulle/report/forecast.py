"""Draws the page of a forecast: what `tulle simulate` found, as bars, curves and a timeline in one HTML file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tulle.report.quantity as quantity
from tulle.errors import DataError
from tulle.report.marks import Bar, Key, Segment
from tulle.whole_file import write_whole

COLOURS = {
    "computes": "blue",
    "compute": "blue",
    "update": "sky",
    "dense": "orange",
    "sparse": "teal",
    "rows": "gold",
    "model": "grey",
    "pipe": "plum",
    "idle": "line",
}
"""By the kind of a task; of what has no colour of its own that of `model`."""
LABELS = {
    "computes": "computes",
    "compute": "forward and backward",
    "update": "update",
    "dense": "dense gradients",
    "sparse": "gradients of tables, row numbers",
    "rows": "rows of split tables",
    "model": "sums over axis model",
    "pipe": "between stages",
    "idle": "idle",
}
LEAST_PERCENT = 0.02
"""What is narrower is not drawn on the timeline."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A coloured piece of a lane, in per cent of its length."""

    left: float
    percent: float
    colour: str
    label: str


@dataclass(frozen=True, slots=True)
class Lane:
    """What one rank's device or link does in a step."""

    name: str
    resource: str
    pieces: tuple[Piece, ...]


def write_forecast(found: Mapping[str, Any], timeline: Mapping[str, Any], output: Path) -> Path:
    """Draw a forecast as one HTML file without any outer reference.

    Args:
        found: What `tulle simulate --json` prints.
        timeline: The timeline of its last point, as `tulle.simulate.trace` makes it.
        output: The file to write.

    Raises:
        DataError: If the packages that draw (`tulle[report]`) are not installed.
    """
    write_whole(output, render(found, timeline))
    return output


def render(found: Mapping[str, Any], timeline: Mapping[str, Any]) -> str:
    """The page of a forecast."""
    try:
        import tulle.report.scaling_chart as scaling_chart
        from tulle.report.template import fill
    except ImportError as error:
        raise DataError(
            f"a page is drawn with matplotlib and jinja2, but {error.name} is not installed. "
            "Install them: pip install 'tulle[report]'."
        ) from error
    points = found["points"]
    return fill(
        "forecast.html",
        found=found,
        last=points[-1],
        shown_bars=bars(points),
        keys=_keys(_waited_kinds(points)),
        chart=scaling_chart.draw(points),
        chart_keys=(Key("blue", f"{found['scaling']} scaling", "line"), Key("muted", "perfect", "guide")),
        lanes=lanes(timeline),
        lane_keys=_keys(_kinds(timeline)),
        step=milliseconds(points[-1]["step_s"]),
        link=bits(points[-1]["bandwidth_bytes_per_s"]),
        quantity=quantity,
    )


def _keys(kinds: Iterable[str]) -> list[Key]:
    return [Key(COLOURS.get(kind, "grey"), LABELS.get(kind, kind)) for kind in kinds]


def bars(points: Sequence[Mapping[str, Any]]) -> list[Bar]:
    """One bar a cluster, as long as its step takes by the longest."""
    longest_s = max(point["step_s"] for point in points)
    return [
        Bar(
            quantity.plural(point["ranks"], "rank"),
            _detail(point, points),
            milliseconds(point["step_s"]),
            tuple(_segments(point, longest_s)),
        )
        for point in points
    ]


def _detail(point: Mapping[str, Any], points: Sequence[Mapping[str, Any]]) -> str:
    words = [f"{quantity.plural(point['hosts'], 'host')} × {point['processes_per_host']}"]
    if len({one["bandwidth_bytes_per_s"] for one in points}) > 1:
        words.append(bits(point["bandwidth_bytes_per_s"]))
    if len({one["latency_s"] for one in points}) > 1:
        words.append(quantity.duration(point["latency_s"]))
    return ", ".join(words)


def _segments(point: Mapping[str, Any], longest_s: float) -> list[Segment]:
    standing: Mapping[str, float] = point["standing_by_kind_s"]
    parts = {"computes": point["computing_s"]} | {kind: standing[kind] for kind in standing if kind != "idle"}
    parts["idle"] = standing.get("idle", 0.0)
    return [
        Segment(COLOURS.get(kind, "grey"), _told(LABELS.get(kind, kind), taken_s), 100 * taken_s / longest_s)
        for kind, taken_s in parts.items()
        if taken_s > 0
    ]


def _waited_kinds(points: Sequence[Mapping[str, Any]]) -> list[str]:
    waited = (kind for point in points for kind, taken_s in point["standing_by_kind_s"].items() if taken_s > 0)
    return ["computes", *dict.fromkeys(kind for kind in waited if kind != "idle"), "idle"]


def lanes(timeline: Mapping[str, Any]) -> list[Lane]:
    """The lanes of a timeline, two a rank."""
    events = [event for event in timeline["traceEvents"] if event["ph"] == "X"]
    if not events:
        return []
    begin = min(event["ts"] for event in events)
    length = max(event["ts"] + event["dur"] for event in events) - begin
    found: dict[tuple[int, int], list[Piece]] = {}
    for event in events:
        percent = 100 * event["dur"] / length
        if percent >= LEAST_PERCENT:
            left = 100 * (event["ts"] - begin) / length
            label = _told(event["name"], event["dur"] / 1e6)
            piece = Piece(left, percent, COLOURS.get(event["cat"], "grey"), label)
            found.setdefault((event["pid"], event["tid"]), []).append(piece)
    return [
        Lane(f"rank {rank}", ("device", "link")[thread], tuple(found[rank, thread])) for rank, thread in sorted(found)
    ]


def _kinds(timeline: Mapping[str, Any]) -> list[str]:
    kinds = {event["cat"] for event in timeline["traceEvents"] if event["ph"] == "X"}
    return [kind for kind in COLOURS if kind in kinds] + sorted(kinds - COLOURS.keys())


def milliseconds(value_s: float) -> str:
    """A time of which small differences matter.

    Example:
        >>> milliseconds(1.9694), milliseconds(0.01234)
        ('1,969 ms', '12.3 ms')
    """
    return f"{value_s * 1e3:,.0f} ms" if value_s >= 1 else f"{value_s * 1e3:.3g} ms"


def bits(value_bytes_per_s: float) -> str:
    """A bandwidth as makers of networks tell it.

    Example:
        >>> bits(125e9), bits(12.5e9), bits(118e6)
        ('1 Tbit/s', '100 Gbit/s', '944 Mbit/s')
    """
    value = 8 * value_bytes_per_s
    unit, size = next(((unit, size) for unit, size in (("T", 1e12), ("G", 1e9)) if value >= size), ("M", 1e6))
    return f"{value / size:.3g} {unit}bit/s"


def _told(name: str, taken_s: float) -> str:
    return f"{name}: {milliseconds(taken_s)}"
