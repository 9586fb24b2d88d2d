"""What is still to be measured, in which order, and how long it will take."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
PLAIN_WARMUP, PLAIN_STEPS = 2, 4
"""Of the step without communication, before each plan: not counted, and counted."""
WARMUP = 6
"""Steps until one is like the other: memory that a plan before has given back is asked for anew, rows are told late."""
STEP_S = {"translate": 0.15, "language-model": 0.045, "recommend": 0.05, "large-model": 0.045, "named": 0.3}
"""Of a step on two hosts, about; only to tell how long all will take."""
_FINALISTS, _FAR = 3, 1.3
"""Rivals that race the planner's plan in the end; none that took so many times as long as the fastest."""
_START_S, _MAKE_S = 15.0, 0.6
"""To start and profile a job; to make a model and put a plan on it."""


@dataclass(frozen=True)
class Effort:
    """How much of a job is measured.

    Args:
        plans: Beside the planner's own.
        steps: Timed of a plan in a round.
        rounds: In which plans take turns.
        finals: Turns that the fastest take beside the planner's own, afterwards.
    """

    plans: int
    steps: int
    rounds: int
    finals: int = 0


@dataclass(frozen=True)
class Item:
    """A job in a setting.

    Args:
        hosts: Of the cluster.
        rate: Of its links.
        job: Its name.
    """

    hosts: int
    rate: str
    job: str

    def path(self, results: Path) -> Path:
        """Where its result lies, with those of other jobs in the same setting."""
        return results / f"{self.hosts}x{self.rate}.json"

    def is_done(self, results: Path, effort: Effort) -> bool:
        """Whether it was measured with as much effort."""
        path = self.path(results)
        known = json.loads(path.read_text())["jobs"].get(self.job, {}) if path.exists() else {}
        return known.get("effort") == vars(effort)

    def expected_s(self, effort: Effort) -> float:
        """How long it takes, about: hosts beyond the cores take turns on them, and on one host there is one plan."""
        cores = os.cpu_count() or 1
        timed = effort.rounds * (effort.plans + 1 if self.hosts > 1 else 1)
        steps = timed * (PLAIN_STEPS + PLAIN_WARMUP + WARMUP + effort.steps + 1)
        if self.hosts > 1:
            timed += (raced := effort.finals * (1 + _FINALISTS))
            steps += raced * (WARMUP + effort.steps + 1)
        crowded = max(1.0, self.hosts / cores)
        return crowded * (_START_S + timed * _MAKE_S + steps * STEP_S[self.job])


def agenda(hosts: Sequence[int], rates: Sequence[str], jobs: Sequence[str]) -> Iterator[Item]:
    """All jobs in all settings, so that what was measured when time is up tells most: a job of each kind first.

    On one host there is nothing to send, so that one rate is all rates.
    """
    for rate in rates:
        for number in hosts:
            if number > 1 or rate == rates[0]:
                for job in jobs:
                    yield Item(number, rate, job)


def within(items: Sequence[Item], effort: Effort, seconds: float) -> list[Item]:
    """As many of the first items as are expected to end in time."""
    found: list[Item] = []
    for item in items:
        seconds -= item.expected_s(effort)
        if seconds < 0:
            break
        found.append(item)
    return found


def told(items: Sequence[Item], effort: Effort) -> str:
    """What is to come, for people."""
    minutes = sum(item.expected_s(effort) for item in items) / 60
    return f"{len(items)} jobs, about {minutes:.0f} minutes on a machine that does nothing else"


def worth_a_race(rivals_s: Mapping[str, float], own_s: float) -> list[str]:
    """The few fastest rivals of a plan, by what all took in rounds."""
    fastest = sorted(rivals_s, key=lambda name: rivals_s[name])[:_FINALISTS]
    return [name for name in fastest if rivals_s[name] <= _FAR * min(own_s, rivals_s[fastest[0]])]


def in_turn(racers: Sequence[T], turns: int) -> Iterator[T]:
    """Each of them, so many times, every other time backwards."""
    for turn in range(turns):
        yield from racers if turn % 2 else reversed(racers)


def keep(path: Path, job: str, result: dict[str, Any], machine: dict[str, Any]) -> None:
    """Add a job to what is known of a setting; others stay as they are, and a file is complete or as it was."""
    known: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"jobs": {}}
    hosts, _, rate = path.stem.partition("x")
    whole = {"hosts": int(hosts), "rate": rate, "machine": machine, "jobs": {**known["jobs"], job: result}}
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.write_text(json.dumps(whole, indent=1) + "\n")
    aside.replace(path)
