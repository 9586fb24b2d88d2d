"""`turns`: in which order each rank of a pipeline works on micro-batches, by the rule that the run-time follows.

The run-time has no list: whenever a rank is free, it takes of what is ready what `tulle.pipeline.schedule` prefers.
Here the same rule is played with the predicted times; the order that comes out is one that all ranks can keep.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from tulle.pipeline.schedule import Schedule, held_at_once, preference


@dataclass(frozen=True, slots=True)
class Turn:
    """Forward or backward of one micro-batch through one stage."""

    stage: int
    micro_batch: int
    is_backward: bool


@lru_cache(maxsize=1024)
def turns(
    schedule: Schedule, forward_s: tuple[float, ...], backward_s: tuple[float, ...], ranks: int, micro_batches: int
) -> tuple[Turn, ...]:
    """All turns, in an order in which each comes after those that it needs, and that of each rank is its own.

    Args:
        schedule: The rule of preference.
        forward_s: Seconds of each stage for a micro-batch.
        backward_s: The same of backward.
        ranks: Of axis `pipe`; stage s is on rank s modulo ranks.
        micro_batches: How many.

    Example:
        >>> found = turns("1f1b", (1.0, 1.0), (1.0, 1.0), 2, 3)
        >>> " ".join(f"{'B' if t.is_backward else 'F'}{t.micro_batch}" for t in found if t.stage == 0)
        'F0 F1 B0 F2 B1 B2'
    """
    return tuple(_Play(schedule, (forward_s, backward_s), ranks, micro_batches).order())


@dataclass(slots=True)
class _Play:
    """Ranks that are free take what is ready."""

    schedule: Schedule
    seconds: tuple[Sequence[float], Sequence[float]]
    ranks: int
    micro_batches: int
    _ready: list[list[tuple[tuple[int, ...], Turn]]] = field(init=False)
    _begun: list[int] = field(init=False)
    _forward_left: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self._ready = [[] for _ in range(self.ranks)]
        self._begun = [0] * self.ranks
        self._forward_left = [0] * self.ranks
        for stage in range(self._stages):
            self._forward_left[stage % self.ranks] += self.micro_batches

    @property
    def _stages(self) -> int:
        return len(self.seconds[0])

    def order(self) -> list[Turn]:
        """Play it to the end."""
        for micro_batch in range(self.micro_batches):
            self._add(Turn(0, micro_batch, is_backward=False))
        ends: list[tuple[float, int, Turn]] = []
        played: list[Turn] = []
        is_free = [True] * self.ranks
        now_s = 0.0
        while True:
            for rank in range(self.ranks):
                turn = self._take(rank) if is_free[rank] else None
                if turn is not None:
                    is_free[rank] = False
                    played.append(turn)
                    heapq.heappush(ends, (now_s + self.seconds[turn.is_backward][turn.stage], len(played), turn))
            if not ends:
                assert len(played) == 2 * self._stages * self.micro_batches, "every micro-batch comes through"
                return played
            now_s = ends[0][0]
            while ends and ends[0][0] == now_s:
                _, _, turn = heapq.heappop(ends)
                is_free[turn.stage % self.ranks] = True
                self._end(turn)

    def _take(self, rank: int) -> Turn | None:
        """What the rank prefers of what it may do."""
        ready, aside = self._ready[rank], []
        while ready:
            found = heapq.heappop(ready)
            if self._may_begin(rank, found[1]):
                for one in aside:
                    heapq.heappush(ready, one)
                return self._begin(rank, found[1])
            aside.append(found)
            if found[1].stage == rank and not found[1].is_backward and self.schedule != "gpipe":
                break  # the first of those that are not begun; the others may not either
        for one in aside:
            heapq.heappush(ready, one)
        return None

    def _may_begin(self, rank: int, turn: Turn) -> bool:
        if turn.is_backward:
            return self.schedule != "gpipe" or not self._forward_left[rank]
        held = held_at_once(self.schedule, rank, self.ranks, self._stages, self.micro_batches)
        return turn.stage != rank or self._begun[rank] < held

    def _begin(self, rank: int, turn: Turn) -> Turn:
        if not turn.is_backward:
            self._forward_left[rank] -= 1
            self._begun[rank] += turn.stage == rank
        return turn

    def _end(self, turn: Turn) -> None:
        rank = turn.stage % self.ranks
        if not turn.is_backward:
            is_last = turn.stage == self._stages - 1
            self._add(Turn(turn.stage + (not is_last), turn.micro_batch, is_backward=is_last))
            return
        self._begun[rank] -= turn.stage == rank
        if turn.stage:
            self._add(Turn(turn.stage - 1, turn.micro_batch, is_backward=True))

    def _add(self, turn: Turn) -> None:
        wish = preference(self.schedule, turn.micro_batch, self.ranks, turn.stage, in_backward=turn.is_backward)
        heapq.heappush(self._ready[turn.stage % self.ranks], ((*wish, turn.stage), turn))
