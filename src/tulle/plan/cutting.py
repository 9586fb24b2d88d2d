"""`fast_cuts`: cuts of a model into stages of which the slowest is as fast as can be, by dynamic programming."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from tulle.cost import Network
from tulle.pipeline.partition import Limits, Piece, partition
from tulle.plan.work import Work, total_s

MOST_GROUPS = 64
"""Between so many groups of pieces cuts are looked for, where there are too many pieces to look between all of them."""


def fast_cuts(works: Sequence[Work], stages: int, network: Network) -> list[tuple[int, ...]]:
    """The stage of each piece, with what comes to a stage left out, and counted.

    Args:
        works: The pieces, as they run.
        stages: How many there are.
        network: Between them.
    """
    groups = grouped(works, max(MOST_GROUPS, 2 * stages))
    numbers = {work.name: number for number, group in enumerate(groups) for work in group}
    pieces = [
        Piece(group[0].name, sum(map(total_s, group)), incoming=_incoming(group, number, numbers))
        for number, group in enumerate(groups)
    ]
    found: dict[tuple[int, ...], None] = {}
    for bytes_per_s in (math.inf, network.bandwidth_bytes_per_s):
        of_groups = partition(pieces, stages, Limits(bytes_per_s=bytes_per_s)).stages
        found[tuple(of_groups[numbers[work.name]] for work in works)] = None
    return [*found]


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
