"""Tables of the README: predicted beside measured, and the planner's choice beside the fastest plan that was timed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

BEGIN, END = "<!-- tables -->", "<!-- end of tables -->"
PLANNER = "planner"


@dataclass(frozen=True)
class Row:
    """One plan of one job in one setting."""

    hosts: int
    rate: str
    job: str
    name: str
    predicted_s: float
    measured_s: float
    predicted_bytes: int
    measured_bytes: int
    final_s: tuple[float, ...]
    """Of turns beside the other finalists, if it was one."""
    drift: float
    """By what factor the machine was slower when the plan was timed than when the job was profiled."""

    @property
    def error(self) -> float:
        """Of the predicted step time, by the measured one."""
        return self.predicted_s / self.measured_s - 1

    @property
    def memory_error(self) -> float | None:
        """Of the predicted memory, by the measured one, where it was measured."""
        return self.predicted_bytes / self.measured_bytes - 1 if self.measured_bytes else None


def rows_of(results: Path) -> list[Row]:
    """All plans that were timed."""
    found: list[Row] = []
    for path in sorted(results.glob("*x*.json")):
        setting = json.loads(path.read_text())
        for job, result in setting["jobs"].items():
            for plan in result["plans"]:
                if plan["measured_s"]:
                    final_s = plan.get("final_s", [])
                    times = plan["predicted_s"], median([*plan["measured_s"], *final_s])
                    memory = plan["predicted_bytes"], plan["measured_bytes"]
                    drift = median(plan["plain_s"]) / result["step_s"]
                    found.append(
                        Row(
                            setting["hosts"], setting["rate"], job, plan["name"], *times, *memory, tuple(final_s), drift
                        )
                    )
    return sorted(found, key=lambda row: (row.job, row.hosts, row.rate))


def groups(rows: Sequence[Row]) -> Iterator[list[Row]]:
    """Plans of one job in one setting, of which the planner's is one."""
    for key in dict.fromkeys((row.job, row.hosts, row.rate) for row in rows):
        group = [row for row in rows if (row.job, row.hosts, row.rate) == key]
        if any(row.name == PLANNER for row in group):
            yield group


def as_json(results: Path) -> dict[str, Any]:
    """The same numbers for programs."""
    rows = rows_of(results)
    choices = [_choice(group) for group in groups(rows)]
    return {
        "steps": _errors(row.error for row in rows),
        "memory": _errors(row.memory_error for row in rows),
        "drift": _errors(row.drift - 1 for row in rows),
        "choices": {"worst": max((one["slower"] for one in choices), default=None), "of": choices},
    }


def write_tables(results: Path, folder: Path) -> None:
    """Put the tables between the marks in README.md."""
    readme = folder / "README.md"
    text = readme.read_text()
    before, after = text.partition(BEGIN)[0], text.partition(END)[2]
    readme.write_text(f"{before}{BEGIN}\n{tables(results)}\n{END}{after}")


def tables(results: Path) -> str:
    """Both tables in Markdown."""
    rows = rows_of(results)
    lines = [
        "| example | hosts | link | plans | step predicted / measured (planner's) | median error | worst error "
        "| worst memory error |",
        "|---|--:|---|--:|---|--:|--:|--:|",
    ]
    for group in groups(rows):
        own = next(row for row in group if row.name == PLANNER)
        errors, memory = _errors(row.error for row in group), _errors(row.memory_error for row in group)
        lines.append(
            f"| {own.job} | {own.hosts} | {own.rate} | {len(group)} "
            f"| {own.predicted_s * 1e3:.1f} / {own.measured_s * 1e3:.1f} ms "
            f"| {errors['median']:.0%} | {errors['worst']:.0%} | {_share(memory, 'worst')} |"
        )
    whole, memory = _errors(row.error for row in rows), _errors(row.memory_error for row in rows)
    lines.append(
        f"| **all** | | | {len(rows)} | | **{_share(whole, 'median')}** | **{_share(whole, 'worst')}** "
        f"| **{_share(memory, 'worst')}** |"
    )
    lines += [
        "",
        "| example | hosts | link | fastest plan timed | planner's, by the fastest | half of the turns "
        "| by what other turns say is fastest |",
        "|---|--:|---|---|--:|---|--:|",
    ]
    for choice in map(_choice, groups(rows)):
        setting = f"| {choice['job']} | {choice['hosts']} | {choice['rate']} "
        beside = "–" if choice["crossed"] is None else f"{choice['crossed']:+.1%}"
        lines.append(
            f"{setting}| {choice['fastest']} | {choice['slower']:+.1%} | {_spread(choice['ratios'])} | {beside} |"
        )
    drift = _errors(row.drift - 1 for row in rows)
    off = f"{_share(drift, 'median')} (median), {_share(drift, 'worst')} at worst"
    lines += ["", f"The machine's speed while plans were timed was off that of the profiles by {off}."]
    return "\n".join(lines)


def _choice(group: Sequence[Row]) -> dict[str, Any]:
    """The planner's plan by the fastest of a group: of finalists by turns that they took beside each other.

    `slower` is the middle of `ratios`, of which there is one for each turn. `crossed` is the same where, in each turn,
    the fastest is that of the other turns: of plans that are equal one is ahead by chance, but not in turns to come.
    """
    own = next(row for row in group if row.name == PLANNER)
    ratios = {
        row.name: [mine / its for mine, its in zip(own.final_s, row.final_s, strict=True)]
        for row in group
        if row.final_s and own.final_s
    } or {row.name: [own.measured_s / row.measured_s] for row in group}
    fastest = max(ratios, key=lambda name: median(ratios[name]))
    return {
        "job": own.job,
        "hosts": own.hosts,
        "rate": own.rate,
        "fastest": fastest,
        "slower": median(ratios[fastest]) - 1,
        "ratios": ratios[fastest],
        "crossed": _crossed({**ratios, PLANNER: [1.0] * len(ratios[fastest])}),
    }


def _crossed(ratios: Mapping[str, Sequence[float]]) -> float | None:
    turns = range(len(ratios[PLANNER]))
    if len(turns) < 3:
        return None
    others = {name: [median([*of[:turn], *of[turn + 1 :]]) for turn in turns] for name, of in ratios.items()}
    return median(ratios[max(others, key=lambda name: others[name][turn])][turn] for turn in turns) - 1


def _errors(errors: Iterable[float | None]) -> dict[str, float]:
    found = sorted(abs(error) for error in errors if error is not None)
    return {"median": median(found), "worst": found[-1]} if found else {}


def _spread(ratios: Sequence[float]) -> str:
    """Between which of them the middle half lies."""
    if len(set(ratios)) < 2:
        return "–"
    lower, _, upper = quantiles(ratios, n=4)
    return f"{lower - 1:+.1%} to {upper - 1:+.1%}"


def _share(errors: Mapping[str, float], name: str) -> str:
    return f"{errors[name]:.0%}" if errors else "–"
