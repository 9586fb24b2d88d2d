"""`fast_cut`: a cut of a model into stages that promises the fastest step, of several by dynamic programming."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import product

from tulle.cost import Network
from tulle.pipeline.partition import Limits, Piece, partition
from tulle.plan.work import Work, total_s

MOST_GROUPS = 64
"""Between so many groups of pieces cuts are looked for, where there are too many pieces to look between all of them."""
MANY = 1024
"""Micro-batches, of which the first do not count."""
_SENT_TIMES = (0, 0.25, 1, 4)
"""How often what comes to a stage is counted, in cuts that are made: part of it goes beside what is computed."""


def fast_cut(
    works: Sequence[Work],
    stages: int,
    network: Network,
    *,
    micro_batches: int = MANY,
    once_s: Mapping[str, float] | None = None,
) -> tuple[int, ...]:
    """The stage of each piece.

    The slowest stage is what many micro-batches wait for. Of few each also waits for all stages before and for what is
    sent on its way: on a slow link cuts are better that send less, of fewer stages, down to one that has everything.

    Args:
        works: The pieces, as they run.
        stages: How many there may be.
        network: Between them.
        micro_batches: Of a step.
        once_s: By piece, what it takes once a step.
    """
    groups = grouped(works, max(MOST_GROUPS, 2 * stages))
    numbers = {work.name: number for number, group in enumerate(groups) for work in group}
    once_s = once_s or {}
    pieces = [
        Piece(
            group[0].name,
            sum(map(total_s, group)),
            incoming=_incoming(group, number, numbers),
            once_s=sum(once_s.get(work.name, 0.0) for work in group),
        )
        for number, group in enumerate(groups)
    ]
    found: set[tuple[int, ...]] = set()
    for count, times in product({stages, 3 * stages // 4, stages // 2, 1}, _SENT_TIMES):
        bytes_per_s = network.bandwidth_bytes_per_s / times if times else math.inf
        found.add(tuple(partition(pieces, max(1, count), Limits(None, bytes_per_s, None, micro_batches)).stages))
    best = min(found, key=lambda cut: (_step_s(pieces, cut, network, micro_batches), cut))
    return tuple(best[numbers[work.name]] for work in works)


def _step_s(pieces: Sequence[Piece], cut: Sequence[int], network: Network, micro_batches: int) -> float:
    """What a step takes about, if each stage waits for the one before, and sends beside what it computes."""
    turn_s, ended_s = [0.0] * (cut[-1] + 1), [0.0] * (cut[-1] + 1)
    arriving: list[dict[int, int]] = [{} for _ in turn_s]
    for piece, stage in zip(pieces, cut, strict=True):
        turn_s[stage] += piece.time_s
        ended_s[stage] += piece.once_s
        for source, size_bytes in (piece.incoming or {}).items():
            if cut[source] != stage:
                arriving[stage][source] = max(size_bytes, arriving[stage].get(source, 0))
    begin_s = step_s = 0.0
    for turned_s, ended, values in zip(turn_s, ended_s, arriving, strict=True):
        sent_s = 2 * (network.latency_s * bool(values) + sum(values.values()) / network.bandwidth_bytes_per_s)
        begin_s += sent_s
        step_s = max(step_s, begin_s + turned_s + (micro_batches - 1) * max(turned_s, sent_s) + ended)
        begin_s += turned_s
    return step_s


def grouped(works: Sequence[Work], most: int) -> list[list[Work]]:
    """Consecutive pieces in about so many groups that take alike, if there are more than twice as many pieces.

    What dynamic programming takes grows with the cube of what it cuts between, and a model may have thousands of
    pieces.
    """
    if len(works) <= 2 * most:
        return [[work] for work in works]
    share_s, filled_s = sum(map(total_s, works)) / most, math.inf
    groups: list[list[Work]] = []
    for work in works:
        if filled_s + total_s(work) > share_s:
            groups.append([])
            filled_s = 0.0
        groups[-1].append(work)
        filled_s += total_s(work)
    return groups


def _incoming(group: Sequence[Work], number: int, numbers: Mapping[str, int]) -> dict[int, int]:
    """Bytes that a group reads of others, by their numbers: each value once, as large as it is read."""
    largest: dict[str, int] = {}
    for work in group:
        for name, size_bytes in work.reads.items():
            largest[name] = max(size_bytes, largest.get(name, 0))
    found: dict[int, int] = {}
    for name, size_bytes in largest.items():
        if (source := numbers.get(name, number)) != number:
            found[source] = found.get(source, 0) + size_bytes
    return found
