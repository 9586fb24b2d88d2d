"""Writes the tables of README.md, between its markers, from the raw results."""

# pyright: reportMissingImports=false
from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from figures import Rounds, Spread, by_round, ratios, step_s, ways_of

from report import between_markers, machine, settings_in, table, ways_table

AUTO_WAY = "tulle-auto"
SAME = 1e-3
"""Losses of ways that train the same model differ by no more than this, relatively: by the order of additions."""


def write_tables(results: Path, folder: Path) -> None:
    """Put tables into README.md.

    Raises:
        SystemExit: If there is no result.
    """
    settings = settings_in(results)
    parts = [headline(settings), machine(settings[0]), ways_table(settings), *map(chapter, settings)]
    readme = folder / "README.md"
    readme.write_text(between_markers(readme.read_text(), "\n\n".join(parts)))


def headline(settings: Sequence[Mapping[str, Any]]) -> str:
    """For every setting and workload: tulle as a user would use it, beside the best peer of each kind."""
    rows = [
        row
        for setting in settings
        for workload in setting["workloads"]
        for sharded in (False, True)
        if (row := headline_row(setting, workload, sharded=sharded))
    ]
    head = ["hosts, rate", "workload", "tulle-auto, units/s", "best peer", "units/s", "times faster"]
    return "### In short\n\n" + table(head, rows)


def headline_row(setting: Mapping[str, Any], workload: str, *, sharded: bool) -> list[str] | None:
    """One line, or None if there is nothing to compare; peers that split tables are a kind of their own."""
    rounds: Rounds = setting["rounds"]
    peer = fastest(rounds, ways_of(rounds, peers=True, sharded=sharded), workload)
    ours = by_round(rounds, AUTO_WAY, workload)
    if peer is None or not ours:
        return None
    faster = ratios(rounds, peer, AUTO_WAY, workload, step_s)
    name = f"{setting['hosts']}x{setting['rate']}"
    link = f"[{setting['hosts']}, {setting['rate']}](results/{name}.json)"
    named = f"{peer} (sharded)" if sharded else peer
    theirs = by_round(rounds, peer, workload)
    return [link, workload, _rate(ours), named, _rate(theirs), _ratio(faster, bold=True)]


def chapter(setting: Mapping[str, Any]) -> str:
    """All tables of one setting."""
    rate = min(setting["measured_rate"].values()) / 1e6
    parts = [
        f"### {setting['hosts']} hosts, {setting['rate']}",
        f"The slowest link carried {rate:,.0f} Mbit/s, {len(setting['rounds'])} rounds.",
    ]
    if setting["left_out"]:
        parts.append(f"Not installed, so not measured: {', '.join(setting['left_out'])}.")
    for name, about in setting["workloads"].items():
        said = f"{about['about']}; {about['tables']} tables, {about['rows']:,} rows of {about['width']}"
        parts.append(f"**{name}**: {said}. {agreement(setting['rounds'], name)}")
        parts.append(workload_table(setting["rounds"], name))
    return "\n\n".join(parts)


def workload_table(rounds: Rounds, workload: str) -> str:
    """Every way on one workload, in the order in which they ran: ours, the ablation, then the peers."""
    head = ["way", "units/s", "by tulle-auto's", "step, ms", "computation, ms", "hidden", "MB sent", "peak MB", "plan"]
    rows = [row for way in ways_of(rounds) if (row := way_row(rounds, way, workload))]
    return table(head, rows)


def way_row(rounds: Rounds, way: str, workload: str) -> list[str] | None:
    """One line: medians over rounds and, in brackets, from the least to the most; None if it was not asked to."""
    runs = by_round(rounds, way, workload)
    if not runs:
        errors = [one[way]["errors"].get(workload) for one in rounds if way in one]
        said = next((error for error in errors if error), None)
        if said is None:
            return None
        reason = next((line.strip() for line in reversed(said.splitlines()) if line.strip()), said)
        return [way, f"failed: {reason[:100].replace('|', '/')}", *[""] * 7]
    steps_s = Spread.of([step_s(run) for run in runs])
    sent = [run["sent_bytes_per_step"]["mean"] for run in runs if run["sent_bytes_per_step"]]
    hidden = [share for run in runs if (share := hidden_share(run)) is not None]
    return [
        way,
        _rate(runs),
        _ratio(ratios(rounds, AUTO_WAY, way, workload, step_s)),
        f"{steps_s.middle * 1e3:.0f} ({steps_s.least * 1e3:.0f} to {steps_s.most * 1e3:.0f})",
        f"{median(median(run['local_step_s']) for run in runs) * 1e3:.0f}",
        f"{median(hidden):.0%}" if hidden else "",
        f"{median(sent) / 1e6:.1f}" if sent else "",
        f"{median(run['peak_resident_bytes'] for run in runs) / 1e6:,.0f}",
        kept(runs),
    ]


def fastest(rounds: Rounds, ways: Sequence[str], workload: str) -> str | None:
    """The way of least median seconds a step; None if none of them measured the workload."""
    middles = {way: median(step_s(run) for run in runs) for way in ways if (runs := by_round(rounds, way, workload))}
    return min(middles, key=middles.__getitem__) if middles else None


def hidden_share(run: Mapping[str, Any]) -> float | None:
    """The share of the time with communication under way in which nobody waited for it; None if it was not seen."""
    under_way_s = run["more"].get("under_way_s")
    return 1 - run["more"]["waited_s"] / under_way_s if under_way_s else None


def kept(runs: Sequence[Mapping[str, Any]]) -> str:
    """How the tables were kept in the end, each kind once."""
    return ", ".join(dict.fromkeys(scheme for run in runs for scheme in (run["more"].get("schemes") or {}).values()))


def agreement(rounds: Rounds, workload: str) -> str:
    """Whether all ways have trained the same model, by rank 0's losses."""
    losses = {way: runs[0]["more"]["losses"] for way in ways_of(rounds) if (runs := by_round(rounds, way, workload))}
    if len(losses) < 2:
        return ""
    off = {way: furthest(found, losses) for way, found in losses.items()}
    worst = max(off, key=off.__getitem__)
    if off[worst] <= SAME:
        return f"All ways have the same losses, to {off[worst]:.0e} of their value."
    apart = ", ".join(f"{way} ({share:.0e})" for way, share in off.items() if share > SAME)
    return f"**Losses are not those of the other ways: {apart}.**"


def furthest(found: Sequence[float], losses: Mapping[str, Sequence[float]]) -> float:
    """How far losses are from the median of all ways, at most, relative to it; over the steps that both took."""
    middles = [median(step) for step in zip(*losses.values(), strict=False)]
    return max(abs(mine - middle) / abs(middle) for mine, middle in zip(found, middles, strict=False))


def _rate(runs: Sequence[Mapping[str, Any]]) -> str:
    found = Spread.of([run["more"]["units_per_step"] / step_s(run) for run in runs])
    return f"{found.middle:,.0f} ({found.least:,.0f} to {found.most:,.0f})"


def _ratio(found: Sequence[float], *, bold: bool = False) -> str:
    if not found:
        return "no common round"
    middle = f"**{median(found):.2f}**" if bold else f"{median(found):.2f}"
    return f"{middle} ({min(found):.2f} to {max(found):.2f})"
