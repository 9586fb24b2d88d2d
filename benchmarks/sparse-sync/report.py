"""Writes the tables of README.md, between its markers, and the plots, from the raw results."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from figures import (
    Rounds,
    Spread,
    best,
    best_scheme,
    by_round,
    choice_ratio,
    grid_figures,
    ratios,
    step_s,
    synchronization_s,
    ways_of,
)
from grid import Point
from plots import plot_choices, plot_ways
from race import Ratio

AUTO_WAY = "tulle-auto"
BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"


def write_report(results: Path, folder: Path) -> None:
    """Put tables into README.md and plots beside it.

    Raises:
        SystemExit: If there is no result.
    """
    settings = settings_in(results)
    (folder / "plots").mkdir(exist_ok=True)
    parts = [headline(settings), machine(settings[0]), ways_table(settings)]
    for setting in settings:
        name = f"{setting['hosts']}x{setting['rate']}"
        parts.append(chapter(setting))
        if plot_ways(setting, folder / "plots" / f"{name}.svg"):
            parts.append(f"![Seconds of synchronization, {name}](plots/{name}.svg)")
        if "grid" in setting["studies"]:
            plot_choices(setting["studies"]["grid"]["points"], folder / "plots" / f"{name}-grid.svg")
            parts.append(f"![Predicted and measured seconds, {name}](plots/{name}-grid.svg)")
    readme = folder / "README.md"
    readme.write_text(between_markers(readme.read_text(), "\n\n".join(parts)))


def settings_in(results: Path) -> list[dict[str, Any]]:
    """The results of all settings, those of few hosts and slow links first.

    Raises:
        SystemExit: If there is none.
    """
    settings = [json.loads(path.read_text()) for path in results.glob("*.json")]
    if not settings:
        raise SystemExit(f"there are no results in {results}: measure first")
    return sorted(settings, key=lambda setting: (setting["hosts"], len(setting["rate"]), setting["rate"]))


def between_markers(text: str, content: str) -> str:
    """The text with what stood between the markers replaced.

    Raises:
        ValueError: If a marker is missing.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"expected {BEGIN} and {END} in the text, each once")
    return f"{before}{BEGIN}\n\n{content}\n\n{END}{after}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def headline(settings: Sequence[Mapping[str, Any]]) -> str:
    """For every setting and workload: `auto` beside the best peer that keeps whole tables on every rank."""
    rows: list[list[str]] = []
    for setting in settings:
        rounds: Rounds = setting["rounds"]
        for workload in setting["workloads"]:
            peer = best(rounds, ways_of(rounds, peers=True, sharded=False), workload)
            ours = by_round(rounds, AUTO_WAY, workload)
            if peer is None or not ours:
                continue
            found = ratios(rounds, peer, AUTO_WAY, workload)
            theirs = Spread.of([synchronization_s(measured) for measured in by_round(rounds, peer, workload)])
            auto = Spread.of([synchronization_s(measured) for measured in ours])
            link = f"[{setting['hosts']}, {setting['rate']}](results/{setting['hosts']}x{setting['rate']}.json)"
            faster = f"**{median(found):.2f}** ({min(found):.2f} to {max(found):.2f})" if found else "no common round"
            steps = ratios(rounds, peer, AUTO_WAY, workload, step_s)
            whole = f"{median(steps):.2f}" if steps else ""
            rows.append([link, workload, _ms(auto), peer, _ms(theirs), faster, whole])
    head = ["hosts, rate", "workload", "tulle-auto, ms", "best peer", "ms", "times faster", "whole step"]
    return "### In short\n\n" + table(head, rows)


def machine(setting: Mapping[str, Any]) -> str:
    """What it ran on, and with which versions."""
    found = setting["machine"]
    versions: dict[str, str] = {}
    for one in setting["rounds"]:
        for result in one.values():
            for measured in result["workloads"].values():
                versions |= measured["versions"]
    listed = ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))
    return (
        f"{found['processor']}, {found['cores']} cores for all hosts together, Linux {found['kernel']}, "
        f"Python {found['python']}; {listed}. Command: `{found['command']}`"
    )


def ways_table(settings: Sequence[Mapping[str, Any]]) -> str:
    """What each way sends, in its own words."""
    about = {name: result["about"] for setting in settings for one in setting["rounds"] for name, result in one.items()}
    return table(["way", "what moves"], [[name, said] for name, said in about.items()])


def chapter(setting: Mapping[str, Any]) -> str:
    """All tables of one setting."""
    rate = min(setting["measured_rate"].values()) / 1e6
    parts = [f"### {setting['hosts']} hosts, {setting['rate']}", f"The slowest link carried {rate:,.0f} Mbit/s."]
    if setting["left_out"]:
        parts.append(f"Not installed, so not measured: {', '.join(setting['left_out'])}.")
    for name, workload in setting["workloads"].items():
        about = f"{workload['about']}; {workload['rows']:,} x {workload['width']}, {workload['tokens']:,} ids a rank"
        inside = workload_table(setting["rounds"], name)
        parts.append(f"<details><summary>{name}: {about}</summary>\n\n{inside}\n\n</details>")
    for name, error in setting["failed_studies"].items():
        parts.append(f"Study {name} failed: {error.splitlines()[0][:100]}")
    studies = setting["studies"]
    if "grid" in studies:
        parts.append(grid_text(studies["grid"]["points"]))
    if "tied" in studies:
        parts.append(tied_table(studies["tied"]))
    return "\n\n".join(parts)


def workload_table(rounds: Rounds, workload: str) -> str:
    """Every way on one workload; those that shard the table below the others."""
    rows = [way_row(rounds, way, workload) for sharded in (False, True) for way in ways_of(rounds, sharded=sharded)]
    head = ["way", "synchronization, ms", "by tulle-auto's", "steps/s", "MB sent a step", "peak MB", "steps"]
    return table(head, rows)


def way_row(rounds: Rounds, way: str, workload: str) -> list[str]:
    """One line: medians over rounds, and from the least to the most; or why there are none."""
    runs = by_round(rounds, way, workload)
    is_sharded = any(one[way]["is_sharded"] for one in rounds if way in one)
    shown = f"{way} (sharded)" if is_sharded else way
    if not runs:
        errors = [one[way]["errors"].get(workload) for one in rounds if way in one]
        said = next((error for error in errors if error), "not measured")
        reason = next((line.strip() for line in reversed(said.splitlines()) if line.strip()), said)
        return [shown, f"failed: {reason[:100].replace('|', '/')}", "", "", "", "", ""]
    found = ratios(rounds, way, AUTO_WAY, workload)
    ratio = f"{median(found):.2f} ({min(found):.2f} to {max(found):.2f})" if found else ""
    sent = [run["sent_bytes_per_step"]["mean"] for run in runs if run["sent_bytes_per_step"]]
    return [
        shown,
        _ms(Spread.of([synchronization_s(run) for run in runs])),
        ratio,
        f"{median(1 / median(run['step_s']) for run in runs):.1f}",
        f"{median(sent) / 1e6:.2f}" if sent else "",
        f"{median(run['peak_resident_bytes'] for run in runs) / 1e6:.0f}",
        str(sum(len(run["step_s"]) for run in runs)),
    ]


def grid_text(points: Sequence[Mapping[str, Any]]) -> str:
    """How good predictions and choices were on the grid."""
    figures = grid_figures(points)
    unknown = figures.points - figures.near_best - figures.far_from_best
    rows = [
        [str(Point(**point["point"])), point["auto"], best_scheme(point), _interval(choice_ratio(point))]
        for point in points
    ]
    inside = table(["point", "auto takes", "least median", "auto by the best"], rows)
    return (
        f"**Grid** of {figures.points} points, every scheme on each: predicted seconds are "
        f"{figures.median_seconds_error:.0%} off the measured ones (median), bytes "
        f"{figures.worst_bytes_error:.1%} (worst). `auto` is within 5% of the best scheme on {figures.near_best} "
        f"points ({figures.near_best / figures.points:.0%}), is not on {figures.far_from_best}, and on {unknown} the "
        f"interval of the ratio leaves it open; at worst it takes {_interval(figures.worst_choice)} times as long.\n\n"
        f"<details><summary>Every point</summary>\n\n{inside}\n\n</details>"
    )


def tied_table(tied: Mapping[str, Any]) -> str:
    """The tied table of *Densifying*: what gathering and reducing hold in memory."""
    rows = [
        [
            str(line["ranks"]),
            f"{line['gather_bytes'] / 1e6:,.0f}",
            f"{line['densify_bytes'] / 1e6:,.0f}",
            f"{line['gather_s']:.2f}" if line.get("gather_s") else "by arithmetic",
            f"{line['densify_s']:.2f}" if line.get("densify_s") else "by arithmetic",
            line.get("auto", ""),
        ]
        for line in tied["lines"]
    ]
    head = ["ranks", "gathered, MB", "densified, MB", "gather, s", "densify, s", "auto takes"]
    return "**Tied table** (33,708 x 1,024; 5,000 + 5,000 tokens and a dense gradient a rank):\n\n" + table(head, rows)


def _ms(spread: Spread) -> str:
    return f"{spread.middle * 1e3:.1f} ({spread.least * 1e3:.1f} to {spread.most * 1e3:.1f})"


def _interval(ratio: Ratio) -> str:
    said = "" if ratio.is_met else ", not near" if ratio.is_missed else ", open"
    return f"{ratio.middle:.2f} ({ratio.low:.2f} to {ratio.high:.2f}{said})"
