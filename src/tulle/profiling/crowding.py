"""`crowding`: how much faster a rank computes while others that share its processors and memory wait."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from statistics import mean, median

from tulle.comm import barrier, gather_values
from tulle.mesh import Axis
from tulle.profiling.steps import Twin

_BUDGET_S = 4.0
"""For about so long it is measured."""
_FEWEST, _MOST = 2, 20
_ALIKE = 0.95
"""What is hardly faster alone shares nothing."""
_BOOTED = Path("/proc/sys/kernel/random/boot_id")
"""The same in all containers and network namespaces of a machine, whatever each calls itself."""
_LABEL = "the profile"


def crowding(twin: Twin, axis: Axis) -> tuple[float, ...]:
    """What forward and backward take while 1, 2, .. ranks of a machine compute, by what they take while all do.

    Measured are powers of two; what is between is interpolated. Every rank of the axis must call it.

    Args:
        twin: What computes; it has done so before.
        axis: All ranks.

    Returns:
        As many factors as a machine has ranks; empty where it makes no difference, where ranks have devices of their
        own, and where not all machines have as many ranks, one after the other.
    """
    ranks = 1 if axis.device.type == "cuda" else _sharing(axis)
    if ranks == 1:
        return ()
    counts = [*(2**power for power in range((ranks - 1).bit_length())), ranks]
    all_s = max(gather_values(_seconds(twin, axis, computes=True), axis, label=_LABEL))
    mine: list[list[float]] = [[] for _ in counts]
    for _ in range(min(max(_FEWEST, round(_BUDGET_S / (len(counts) * all_s))), _MOST)):
        for count, times_s in zip(counts, mine, strict=True):
            computes = axis.rank % ranks < count
            taken_s = _seconds(twin, axis, computes=computes)
            if computes:
                times_s.append(taken_s)
    of_ranks = gather_values(mine, axis, label=_LABEL)
    typical_s = [_typical_s([times_s[number] for times_s in of_ranks]) for number in range(len(counts))]
    slowest_s = [*accumulate(typical_s, max)]  # more ranks do not make it faster
    factors = [one / slowest_s[-1] for one in slowest_s]
    if factors[0] > _ALIKE:
        return ()
    return tuple(_interpolated(count, counts, factors) for count in range(1, ranks + 1))


def _sharing(axis: Axis) -> int:
    """How many ranks a machine has; one if machines differ in that, or ranks of several alternate."""
    try:
        machine = _BOOTED.read_text(encoding="ascii")
    except OSError:  # no Linux
        machine = f"rank {axis.rank}"
    machines = gather_values(machine, axis, label=_LABEL)
    ranks = machines.count(machines[0])
    by_machine = sorted(machines, key=machines.index)
    is_regular = machines == by_machine and all(machines.count(one) == ranks for one in machines)
    return ranks if is_regular else 1


def _seconds(twin: Twin, axis: Axis, *, computes: bool) -> float:
    """What this rank takes; who does not compute waits until all have."""
    barrier(axis)
    taken_s = twin.seconds(lambda: twin.forward(twin.samples[0]).backward()) if computes else 0.0
    barrier(axis)
    twin.clear()
    return taken_s


def _typical_s(of_ranks: Sequence[Sequence[float]]) -> float:
    """The median round of what those that computed took on average."""
    rounds = zip(*(times_s for times_s in of_ranks if times_s), strict=True)
    return median(mean(one) for one in rounds)


def _interpolated(count: int, counts: Sequence[int], factors: Sequence[float]) -> float:
    at = bisect_left(counts, count)
    if counts[at] == count:
        return factors[at]
    low, high = counts[at - 1], counts[at]
    return factors[at - 1] + (factors[at] - factors[at - 1]) * (count - low) / (high - low)
