"""`turns`: in which order each rank of a pipeline works on micro-batches, by the rule that the run-time follows.

The run-time has no list: whenever a rank is free, it takes of what is ready what `tulle.pipeline.schedule` prefers.
Here the same rule is played with the predicted times; the order that comes out is one that all ranks can keep.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from tulle.pipeline.schedule import Schedule, held_at_once, in_idleness, preference, stages_here


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
    _places: list[_Place] = field(init=False)

    def __post_init__(self) -> None:
        stages = len(self.seconds[0])
        self._places = [
            _Place(
                self.schedule,
                rank,
                self.ranks,
                stages_here(rank, self.ranks, stages),
                held_at_once(self.schedule, rank, self.ranks, stages, self.micro_batches),
                forward_left=self.micro_batches * len(range(rank, stages, self.ranks)),
            )
            for rank in range(self.ranks)
        ]

    @property
    def _stages(self) -> int:
        return len(self.seconds[0])

    def order(self) -> list[Turn]:
        """Play it to the end."""
        self._add(Turn(0, 0, is_backward=False))
        ends: list[tuple[float, int, Turn]] = []
        played: list[Turn] = []
        is_free = [True] * self.ranks
        now_s = 0.0
        while True:
            for rank, place in enumerate(self._places):
                turn = place.take() if is_free[rank] else None
                if turn is not None:
                    is_free[rank] = False
                    played.append(turn)
                    heapq.heappush(ends, (now_s + self.seconds[turn.is_backward][turn.stage], len(played), turn))
                    if not (turn.stage or turn.is_backward) and turn.micro_batch + 1 < self.micro_batches:
                        self._add(Turn(0, turn.micro_batch + 1, is_backward=False))
            if not ends:
                assert len(played) == 2 * self._stages * self.micro_batches, "every micro-batch comes through"
                return played
            now_s = ends[0][0]
            while ends and ends[0][0] == now_s:
                _, _, turn = heapq.heappop(ends)
                is_free[turn.stage % self.ranks] = True
                self._end(turn)

    def _end(self, turn: Turn) -> None:
        self._places[turn.stage % self.ranks].end(turn)
        if not turn.is_backward:
            is_last = turn.stage == self._stages - 1
            self._add(Turn(turn.stage + (not is_last), turn.micro_batch, is_backward=is_last))
        elif turn.stage:
            self._add(Turn(turn.stage - 1, turn.micro_batch, is_backward=True))

    def _add(self, turn: Turn) -> None:
        self._places[turn.stage % self.ranks].ready.append(turn)


@dataclass(slots=True)
class _Place:
    """One rank: what is ready for it, and what it holds; the rules are those of `tulle.pipeline.turns`.

    Args:
        schedule: The rule of preference.
        rank: Its number.
        ranks: Of the axis.
        stages_here: How many stages it has.
        most_held: How many pairs of micro-batch and stage it may hold.
        forward_left: How many forward turns have not begun.
    """

    schedule: Schedule
    rank: int
    ranks: int
    stages_here: int
    most_held: int
    forward_left: int
    ready: list[Turn] = field(default_factory=list)
    _held: dict[int, int] = field(default_factory=dict)
    """Of each micro-batch that has begun, the oldest first, how many stages have run forward and not yet backward."""
    _in_backward: set[int] = field(default_factory=set)

    def take(self) -> Turn | None:
        """What the rank prefers of what it may do."""
        held = sum(max(1, pairs) for pairs in self._held.values())
        is_full = held >= self.most_held - in_idleness(self.schedule)
        allowed = [turn for turn in self.ready if self._may_run(turn, is_full=is_full, has_room=held < self.most_held)]
        if not allowed:
            return None
        best = min(allowed, key=lambda turn: self._preference(turn, is_full=is_full))
        self.ready.remove(best)
        if best.is_backward:
            self._in_backward.add(best.micro_batch)
        else:
            self.forward_left -= 1
            self._held.setdefault(best.micro_batch, 0)
        return best

    def end(self, turn: Turn) -> None:
        """A turn that was taken is over."""
        self._held[turn.micro_batch] += -1 if turn.is_backward else 1
        if turn.is_backward and turn.stage == self.rank:  # the first of its stages comes last
            del self._held[turn.micro_batch]
            self._in_backward.discard(turn.micro_batch)

    def _may_run(self, turn: Turn, *, is_full: bool, has_room: bool) -> bool:
        if turn.is_backward:
            return self.schedule != "gpipe" or not self.forward_left
        if turn.micro_batch not in self._held:
            return has_room and self._may_begin(turn)
        return not is_full or turn.micro_batch == next(iter(self._held))

    def _may_begin(self, turn: Turn) -> bool:
        """Not before those of earlier groups have come to this rank's last stage."""
        earlier = [other for other in self._held if other // self.ranks < turn.micro_batch // self.ranks]
        return self.stages_here == 1 or all(
            other in self._in_backward or self._held[other] == self.stages_here for other in earlier
        )

    def _preference(self, turn: Turn, *, is_full: bool) -> tuple[int, ...]:
        preferred = preference(turn.micro_batch, self.ranks, turn.stage, in_backward=turn.is_backward, is_full=is_full)
        return (*preferred, turn.stage)
