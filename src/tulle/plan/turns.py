"""`turns`: in which order each rank of a pipeline works on micro-batches, by the rule that the run-time follows.

The run-time has no list: whenever a rank is free, it takes of what is ready what `tulle.pipeline.schedule` prefers.
Here the same rule is played with the predicted times; the order that comes out is one that all ranks can keep.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from tulle.pipeline.schedule import Schedule, held_at_once, in_idleness, kept_at_once, preference, stages_here

_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Turn:
    """Forward or backward of one micro-batch through one stage, or what backward has put off.

    Args:
        stage: The stage.
        micro_batch: Its number.
        is_backward: Whether it is no forward.
        weights: If it is what was put off: the share of it that the rank does before it goes on with something else.
    """

    stage: int
    micro_batch: int
    is_backward: bool
    weights: float = 0.0


@lru_cache(maxsize=1024)
def turns(
    schedule: Schedule,
    forward_s: tuple[float, ...],
    backward_s: tuple[float, ...],
    ranks: int,
    micro_batches: int,
    weights_s: tuple[float, ...] = (),
) -> tuple[Turn, ...]:
    """All turns, in an order in which each comes after those that it needs, and that of each rank is its own.

    Args:
        schedule: The rule of preference.
        forward_s: Seconds of each stage for a micro-batch.
        backward_s: The same of backward.
        ranks: Of axis `pipe`; stage s is on rank s modulo ranks.
        micro_batches: How many.
        weights_s: Of backward, what each stage puts off; nothing if it is not given.

    Example:
        >>> found = turns("1f1b", (1.0, 1.0), (1.0, 1.0), 2, 3)
        >>> " ".join(f"{'B' if t.is_backward else 'F'}{t.micro_batch}" for t in found if t.stage == 0)
        'F0 F1 B0 F2 B1 B2'
        >>> found = turns("zb-h1", (1.0, 1.0), (2.0, 2.0), 2, 3, (0.0, 1.0))
        >>> " ".join(f"{'W' if t.weights else 'FB'[t.is_backward]}{t.micro_batch}" for t in found if t.stage == 1)
        'F0 B0 F1 B1 W0 F2 B2 W1 W2'
    """
    put_off_s = weights_s or (0.0,) * len(backward_s)
    at_once_s = [whole - later for whole, later in zip(backward_s, put_off_s, strict=True)]
    return tuple(_Play(schedule, (forward_s, at_once_s), put_off_s, ranks, micro_batches).order())


@dataclass(slots=True)
class _Play:
    """Plays a pipeline: every rank that is free takes the next turn that is ready."""

    schedule: Schedule
    seconds: tuple[Sequence[float], Sequence[float]]
    put_off_s: Sequence[float]
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
                kept_at_once(self.schedule, rank, self.ranks, stages, self.micro_batches),
                forward_left=self.micro_batches * len(range(rank, stages, self.ranks)),
            )
            for rank in range(self.ranks)
        ]

    @property
    def _stages(self) -> int:
        return len(self.seconds[0])

    def order(self) -> list[Turn]:
        """The turns in the order in which they begin, played to the end."""
        self._add(Turn(0, 0, is_backward=False))
        ends: list[tuple[float, int, int, Turn | None]] = []
        """Seconds, a number that tells them apart, the rank, and its turn, or None to look at what it has put off."""
        played: list[Turn] = []
        free_since_s: list[float | None] = [0.0] * self.ranks
        now_s, count = 0.0, 0
        while True:
            for rank, place in enumerate(self._places):
                since_s = free_since_s[rank]
                if since_s is None:
                    continue
                played += place.catch_up(since_s, now_s)
                free_since_s[rank] = now_s
                turn, count = place.take(), count + 1
                if turn is not None:
                    free_since_s[rank] = None
                    played.append(turn)
                    heapq.heappush(ends, (now_s + self.seconds[turn.is_backward][turn.stage], count, rank, turn))
                    if not (turn.stage or turn.is_backward) and turn.micro_batch + 1 < self.micro_batches:
                        self._add(Turn(0, turn.micro_batch + 1, is_backward=False))
                elif place.owed:
                    heapq.heappush(ends, (now_s + place.owed[0].left_s, count, rank, None))
            if not ends:
                turned = sum(not turn.weights for turn in played)
                assert turned == 2 * self._stages * self.micro_batches, "every micro-batch comes through"
                return played
            now_s = ends[0][0]
            while ends and ends[0][0] == now_s:
                _, _, rank, turn = heapq.heappop(ends)
                if turn is not None:
                    free_since_s[rank] = now_s
                    self._end(turn)

    def _end(self, turn: Turn) -> None:
        place = self._places[turn.stage % self.ranks]
        place.end(turn)
        if turn.is_backward and self.put_off_s[turn.stage] > 0:
            whole_s = self.put_off_s[turn.stage]
            place.owed.append(_Owed(turn.stage, turn.micro_batch, whole_s, whole_s))
        if not turn.is_backward:
            is_last = turn.stage == self._stages - 1
            self._add(Turn(turn.stage + (not is_last), turn.micro_batch, is_backward=is_last))
        elif turn.stage:
            self._add(Turn(turn.stage - 1, turn.micro_batch, is_backward=True))

    def _add(self, turn: Turn) -> None:
        self._places[turn.stage % self.ranks].ready.append(turn)


@dataclass(slots=True)
class _Owed:
    """What a rank has put off of the backward of one micro-batch through one stage."""

    stage: int
    micro_batch: int
    whole_s: float
    left_s: float


@dataclass(slots=True)
class _Place:
    """One rank: what is ready for it, and what it holds; the rules are those of `tulle.pipeline.turns`.

    Args:
        schedule: The rule of preference.
        rank: Its number.
        ranks: Of the axis.
        stages_here: How many stages it has.
        most_held: How many pairs of micro-batch and stage it may hold.
        most_kept: The same with those of which it has put something off.
        forward_left: How many forward turns have not begun.
    """

    schedule: Schedule
    rank: int
    ranks: int
    stages_here: int
    most_held: int
    most_kept: int
    forward_left: int
    ready: list[Turn] = field(default_factory=list)
    owed: deque[_Owed] = field(default_factory=deque)
    """The oldest first."""
    _held: dict[int, int] = field(default_factory=dict)
    """Of each micro-batch that has begun, the oldest first, how many stages have run forward and not yet backward."""
    _in_backward: set[int] = field(default_factory=set)

    def take(self) -> Turn | None:
        """What the rank prefers of what it may do."""
        held = sum(max(1, pairs) for pairs in self._held.values())
        is_full = held >= self.most_held - in_idleness(self.schedule)
        has_room = held < self.most_held and held + len(self.owed) < self.most_kept
        allowed = [turn for turn in self.ready if self._may_run(turn, is_full=is_full, has_room=has_room)]
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

    def catch_up(self, since_s: float, now_s: float) -> list[Turn]:
        """What it did of what it has put off while it had nothing else to do; what no clock tells is done at once."""
        done: list[Turn] = []
        while self.owed:
            owed = self.owed[0]
            left_s = max(0.0, owed.left_s - max(0.0, now_s - since_s))
            if left_s <= _ROUNDING * owed.whole_s or now_s + left_s <= now_s:
                left_s = 0.0
            share_s, owed.left_s = owed.left_s - left_s, left_s
            if share_s:
                done.append(Turn(owed.stage, owed.micro_batch, is_backward=True, weights=share_s / owed.whole_s))
            if left_s:
                break
            since_s += share_s
            self.owed.popleft()
        return done

    def end(self, turn: Turn) -> None:
        """Note that a turn that was taken is over."""
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
