"""Follows what the ranks record while they run: the latest numbers of each, from its lines of JSON."""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tulle.cli.tail import Tail

_WINDOW_STEPS = 20


@dataclass(slots=True)
class RankProgress:
    """The latest numbers of one rank; rates are over its last 20 steps.

    Args:
        step: Last step, 0 before the first.
        loss: Last loss, None if none was logged.
        total_steps: Number of steps that the script announced, None if it did not.
    """

    step: int = 0
    loss: float | None = None
    total_steps: int | None = None
    _recent: deque[Mapping[str, Any]] = field(default_factory=lambda: deque(maxlen=_WINDOW_STEPS))

    def add(self, lines: Iterable[str]) -> None:
        """Take in new lines; what is not a step's record is left out."""
        for line in lines:
            with suppress(ValueError, TypeError, AttributeError, KeyError):
                record = json.loads(line)
                if record.get("kind") == "step":
                    self._add(record)

    def _add(self, record: Mapping[str, Any]) -> None:
        self.step = int(record["step"])
        self.loss = record.get("loss", self.loss)
        self.total_steps = record.get("total_steps", self.total_steps)
        self._recent.append(record)

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens that this rank processed a second, None if it logged none."""
        if not any("tokens" in record for record in self._recent):
            return None
        return self._ratio("tokens", "step_s")

    @property
    def bytes_per_step(self) -> float | None:
        """Bytes that this rank sent a step."""
        if not self._recent:
            return None
        return sum(record.get("bytes_sent") or 0 for record in self._recent) / len(self._recent)

    @property
    def wait_share(self) -> float | None:
        """Share of the steps' time in which this rank stood still for communication."""
        return self._ratio("wait_s", "step_s")

    def _ratio(self, above: str, below: str) -> float | None:
        total = sum(record.get(below) or 0 for record in self._recent)
        return sum(record.get(above) or 0 for record in self._recent) / total if total > 0 else None


class RunProgress:
    """The latest numbers of every rank that records in a run folder.

    Args:
        run: The folder; what it holds already is of an earlier run, which the launcher puts by, and is not shown.
    """

    def __init__(self, run: Path) -> None:
        self._run = run
        self._tails = {rank: Tail(path, skip=True) for rank, path in self._files()}
        self.ranks: dict[int, RankProgress] = {}

    def update(self) -> None:
        """Take in what the ranks have recorded since the last call."""
        for rank, path in self._files():
            tail = self._tails.setdefault(rank, Tail(path))
            if lines := tail.read():
                self.ranks.setdefault(rank, RankProgress()).add(lines)
        self.ranks = dict(sorted(self.ranks.items()))

    def _files(self) -> list[tuple[int, Path]]:
        found = [(re.fullmatch(r"rank-(\d+)\.jsonl", path.name), path) for path in self._run.glob("rank-*.jsonl")]
        return [(int(match[1]), path) for match, path in found if match]

    @property
    def step(self) -> int:
        """The step that every rank has finished."""
        return min((rank.step for rank in self.ranks.values()), default=0)

    @property
    def total_steps(self) -> int | None:
        """Number of steps that the script announced."""
        return self._first(lambda rank: rank.total_steps)

    @property
    def loss(self) -> float | None:
        """Mean over the ranks of their last loss."""
        losses = [rank.loss for rank in self.ranks.values() if rank.loss is not None]
        return sum(losses) / len(losses) if losses else None

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens a second of all ranks together."""
        rates = [rate for rank in self.ranks.values() if (rate := rank.tokens_per_s) is not None]
        return sum(rates) if rates else None

    def _first(self, get: Callable[[RankProgress], int | None]) -> int | None:
        return next((value for rank in self.ranks.values() if (value := get(rank)) is not None), None)
