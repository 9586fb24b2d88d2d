"""`partition`: cuts a model's modules, as they run, into stages so that the slowest is as fast as can be.

Exact, by dynamic programming over the cuts: with B(k, i) the time of the slowest of k stages that hold the first i
pieces,

    B(k, i) = min over j < i of  max(B(k-1, j), time of pieces j..i as stage k)

where a stage that needs more memory than there is takes forever. What a stage takes is its pieces' time and the time of
the bytes that come to it from stages before; if micro-batches are few, each also its share of the wait until the first
has come through the pieces before j.

B(k-1, j) grows with j, and the pieces' time falls, so the best j is near where they meet: from there the search goes up
and down only as far as one of them alone is less than the best that was found. Thousands of pieces take a second.

Source: linear partition as in Narayanan et al., *PipeDream* (SOSP'19, section 3.1), with 1F1B's memory: stage k of n
holds n - k micro-batches.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from tulle.errors import PlanError

COPIES = 4
"""A parameter, its gradient, and two of an optimizer such as Adam."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A module that stays whole.

    Args:
        name: The module's.
        time_s: Of forward and backward of one micro-batch, in seconds.
        parameter_bytes: Of its parameters.
        activation_bytes: What its forward keeps for backward, of one micro-batch.
        incoming: Bytes that it reads of what earlier pieces made, by their number.
        once_s: Seconds of a step that do not grow with the micro-batches: of its update, say.
    """

    name: str
    time_s: float
    parameter_bytes: int = 0
    activation_bytes: int = 0
    incoming: Mapping[int, int] | None = None
    once_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Limits:
    """What stages have.

    Args:
        memory_bytes: Of one rank; None for as much as it takes.
        bytes_per_s: Of the network between ranks.
        pins: Stage of some pieces, by name.
        micro_batches: Of a step; None for so many that no stage's wait for the first one counts.
    """

    memory_bytes: int | None = None
    bytes_per_s: float = math.inf
    pins: Mapping[str, int] | None = None
    micro_batches: int | None = None


@dataclass(frozen=True, slots=True)
class Partition:
    """Pieces dealt to stages.

    Args:
        pieces: In the order in which they run.
        stages: Of each.
        count: How many stages there are.
        times_s: Of each stage, for one micro-batch.
        memory_bytes: Of each stage.
        pinned: Names of the pieces that were not free to go elsewhere.
    """

    pieces: Sequence[Piece]
    stages: Sequence[int]
    count: int
    times_s: Sequence[float]
    memory_bytes: Sequence[int]
    pinned: frozenset[str] = frozenset()

    @property
    def assignment(self) -> dict[str, int]:
        """The stage of each piece by its name."""
        return {piece.name: stage for piece, stage in zip(self.pieces, self.stages, strict=True)}

    @property
    def time_s(self) -> float:
        """Of all pieces, for one micro-batch."""
        return sum(piece.time_s for piece in self.pieces)

    def scaled(self, factor: float) -> Partition:
        """The same where everything takes so many times as long.

        Example:
            >>> partition([Piece("a", 1.0), Piece("b", 2.0)], 2).scaled(1.5).times_s
            [1.5, 3.0]
        """
        pieces = [replace(piece, time_s=factor * piece.time_s) for piece in self.pieces]
        return replace(self, pieces=pieces, times_s=[factor * time_s for time_s in self.times_s])

    def table(self) -> str:
        """A line for each stage: its time, as a number and as a bar, its memory, and its pieces; `*` marks pinned ones.

        Example:
            >>> print(partition([Piece("a", 1.0), Piece("b", 2.0), Piece("c", 1.0)], 2).table())
            stage      time                           memory  modules
                0  3000.0 ms  ####################     0.0 MB  a .. b (2)
                1  1000.0 ms  #######                  0.0 MB  c (1)
        """
        slowest = max(self.times_s) or 1.0
        lines = ["stage      time                           memory  modules"]
        for stage in range(self.count):
            names = [piece.name for piece, at in zip(self.pieces, self.stages, strict=True) if at == stage]
            marked = [f"{name}*" if name in self.pinned else name for name in names]
            ends = f"{marked[0]} .. {marked[-1]}" if len(names) > 1 else "".join(marked)
            ends += "".join(f", {name}" for name in marked[1:-1] if name.endswith("*"))
            bar = "#" * round(20 * self.times_s[stage] / slowest)
            lines.append(
                f"{stage:5d}  {self.times_s[stage] * 1e3:6.1f} ms  {bar:20s}  {self.memory_bytes[stage] / 1e6:6.1f} MB"
                f"  {ends} ({len(names)})"
            )
        return "\n".join(lines)


def partition(pieces: Sequence[Piece], stages: int, limits: Limits | None = None) -> Partition:
    """Cut pieces into consecutive stages so that the slowest takes least time, within memory; exact.

    Pinned pieces are where they are pinned. If these are not in the order in which they run, they are taken out of the
    order, and count at the stage that they are pinned to.

    Raises:
        PlanError: If a pin names no piece or no stage, or no partition fits into memory.

    Example:
        >>> pieces = [Piece("embed", 1.0), Piece("block", 2.0), Piece("block2", 2.0), Piece("head", 3.0)]
        >>> partition(pieces, 2).stages, partition(pieces, 2).times_s
        ((0, 0, 0, 1), (5.0, 3.0))
    """
    limits = limits or Limits()
    pins = limits.pins or {}
    names = {piece.name for piece in pieces}
    for name, stage in pins.items():
        if name not in names or not 0 <= stage < stages:
            raise PlanError(
                f"the pin {name!r}: {stage} names no module that is dealt, or no stage from 0 to {stages - 1}"
            )
    pinned = [pins[piece.name] for piece in pieces if piece.name in pins]
    is_ordered = pinned == sorted(pinned)
    found = _Search(pieces, stages, limits, pins if is_ordered else {}, {} if is_ordered else pins).best()
    if found is None:
        least = min(
            (max(one.memory_bytes) for one in [_Search(pieces, stages, Limits(pins=pins), {}, {}).least_memory()]),
            default=0,
        )
        raise PlanError(
            f"no partition of {len(pieces)} modules into {stages} stages fits into {limits.memory_bytes} bytes a rank; "
            f"the least is {least}: use more stages, smaller micro-batches or activation checkpointing"
        )
    return found


class _Search:
    """The dynamic programme. Stage k holds pieces cut[k-1] to cut[k]."""

    def __init__(
        self, pieces: Sequence[Piece], stages: int, limits: Limits, within: Mapping[str, int], apart: Mapping[str, int]
    ) -> None:
        self._all, self._count, self._limits = pieces, stages, limits
        self._pieces = [(number, piece) for number, piece in enumerate(pieces) if piece.name not in apart]
        self._apart = [[piece for piece in pieces if apart.get(piece.name) == stage] for stage in range(stages)]
        self._within = [within.get(piece.name) for _, piece in self._pieces]
        self._time = [0.0, *accumulate(piece.time_s for _, piece in self._pieces)]
        self._once = [0.0, *accumulate(piece.once_s for _, piece in self._pieces)]
        self._a_micro_batch = 1 / limits.micro_batches if limits.micro_batches else 0.0
        self._parameters = [0, *accumulate(piece.parameter_bytes for _, piece in self._pieces)]
        self._activations = [0, *accumulate(piece.activation_bytes for _, piece in self._pieces)]
        self._arrivals = _arrivals(self._pieces)

    def best(self) -> Partition | None:
        """That of which the slowest stage takes least, or None if none fits."""
        return self._solve(by_memory=False)

    def least_memory(self) -> Partition:
        """That of which the fullest stage holds least."""
        found = self._solve(by_memory=True)
        assert found is not None, "without a limit there is always one"
        return found

    def _solve(self, *, by_memory: bool) -> Partition | None:
        length = len(self._pieces)
        slowest = [0.0, *([math.inf] * length)]
        cuts: list[list[int]] = []
        for stage in range(self._count):
            then, choice = [math.inf] * (length + 1), [0] * (length + 1)
            first = 0
            for end in range(length + 1):
                if end and self._within[end - 1] not in (None, stage):
                    first = end  # a stage that holds this piece is none that this one could be
                if end == length or stage < self._count - 1:  # the last stage ends with the last piece
                    then[end], choice[end] = self._cut(stage, first, end, slowest, by_memory=by_memory)
            slowest, cuts = then, [*cuts, choice]
        return self._told(cuts) if slowest[length] < math.inf else None

    def _cut(self, stage: int, first: int, end: int, slowest: Sequence[float], *, by_memory: bool) -> tuple[float, int]:
        """What the slowest takes if a stage ends here, and where that stage best begins: as late as can be.

        Args:
            stage: Which.
            first: It may begin there, or later.
            end: The piece that is not in it any more.
            slowest: Of the stages before, by where these end; it grows.
            by_memory: Whether memory is what is to be least, not time.
        """
        limit = self._limits.memory_bytes
        if limit is not None and not by_memory:
            first += bisect_left(range(first, end + 1), -limit, key=lambda begin: -self._memory(stage, begin, end))
        if first > end:
            return math.inf, 0

        def least(begin: int) -> float:
            return self._memory(stage, begin, end) if by_memory else self._least_time(begin, end)

        def whole(begin: int) -> float:
            if by_memory:
                return max(slowest[begin], least(begin))
            waited_s = self._a_micro_batch * self._time[begin]
            return max(slowest[begin], self._stage_time(stage, begin, end) + waited_s)

        meeting = first + bisect_left(range(first, end), 0.0, key=lambda begin: slowest[begin] - least(begin))
        best = whole(meeting)
        begin = meeting + 1
        while begin <= end and slowest[begin] < best:
            best, begin = min(best, whole(begin)), begin + 1
        begin = meeting - 1
        while begin >= first and least(begin) < best:
            best, begin = min(best, whole(begin)), begin - 1
        latest = min(end, bisect_right(slowest, best) - 1)
        return best, next((begin for begin in range(latest, first - 1, -1) if whole(begin) <= best), 0)

    def _least_time(self, begin: int, end: int) -> float:
        """What a stage takes without what comes to it, but with its part of the wait for the stages before."""
        once_s = self._once[end] - self._once[begin]
        return self._time[end] - (1 - self._a_micro_batch) * self._time[begin] + self._a_micro_batch * once_s

    def _stage_time(self, stage: int, begin: int, end: int) -> float:
        time_s = self._time[end] - self._time[begin] + sum(piece.time_s for piece in self._apart[stage])
        time_s += self._a_micro_batch * (self._once[end] - self._once[begin])
        if self._limits.bytes_per_s == math.inf or begin == end:
            return time_s
        readers, sizes = self._arrivals[begin]
        arriving = sizes[bisect_left(readers, end)]
        return time_s + 2 * arriving / self._limits.bytes_per_s  # values, and their gradients

    def _memory(self, stage: int, begin: int, end: int) -> int:
        held, apart = self._count - stage, self._apart[stage]
        parameters = self._parameters[end] - self._parameters[begin] + sum(piece.parameter_bytes for piece in apart)
        activations = self._activations[end] - self._activations[begin] + sum(piece.activation_bytes for piece in apart)
        return COPIES * parameters + held * activations

    def _told(self, cuts: Sequence[Sequence[int]]) -> Partition:
        ends = [len(self._pieces)]
        for choice in reversed(cuts):
            ends.insert(0, choice[ends[0]])
        stretches = list(pairwise(ends))
        stage_of = {number: stage for stage, (b, e) in enumerate(stretches) for number, _ in self._pieces[b:e]}
        apart = {piece.name: at for at, pieces in enumerate(self._apart) for piece in pieces}
        stages = [stage_of[n] if n in stage_of else apart[piece.name] for n, piece in enumerate(self._all)]
        times = [self._stage_time(stage, b, e) for stage, (b, e) in enumerate(stretches)]
        memory = [self._memory(stage, b, e) for stage, (b, e) in enumerate(stretches)]
        pinned = frozenset(self._limits.pins or ())
        return Partition(tuple(self._all), tuple(stages), self._count, tuple(times), tuple(memory), pinned)


def _arrivals(pieces: Sequence[tuple[int, Piece]]) -> list[tuple[list[int], list[int]]]:
    """Of each place where a stage may begin which pieces read what comes from before it, and what has come by then.

    Of bytes one number more than of readers: what has come before the first, before the second, ..., after the last. A
    value that several read comes once, at its largest.
    """
    found: list[tuple[list[int], list[int]]] = [([], [0])]
    growing: dict[int, list[tuple[int, int]]] = {}  # by source its readers, of which each reads more than those before
    for begin in reversed(range(len(pieces))):
        number, piece = pieces[begin]
        for source, size in (piece.incoming or {}).items():
            growing[source] = [(begin, size), *(one for one in growing.get(source, ()) if one[1] > size)]
        growing = {source: readers for source, readers in growing.items() if source < number}
        steps = sorted(
            (reader, size - before)
            for readers in growing.values()
            for (reader, size), before in zip(readers, [0, *(size for _, size in readers)], strict=False)
        )
        found.append(([reader for reader, _ in steps], [0, *accumulate(size for _, size in steps)]))
    return found[::-1]
