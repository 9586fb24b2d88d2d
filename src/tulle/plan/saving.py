"""`with_recomputed`: which modules are to recompute their activations so that a plan fits in memory.

The choice is a knapsack: seconds of forward that run again against bytes that are not kept. Of a pipeline each rank has
one of its own: it holds other pieces, of another number of micro-batches, and what it does not keep helps no other.

Source: Chen et al., *Training Deep Nets with Sublinear Memory Cost* (2016), section 3.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tulle.memory import Memory
from tulle.plan.plan import PIPE, Plan
from tulle.plan.space import MOST_SUBSETS, subsets
from tulle.plan.work import stages_of
from tulle.workload import ModuleProfile, Profile

Peaks = Callable[[Memory], Sequence[int]]
"""Bytes that each rank of axis `pipe` needs with some way of saving memory."""


@dataclass(frozen=True, slots=True)
class Recomputed:
    """Ways to fit into memory by recomputing modules.

    Args:
        memories: Each with as little recomputed as fits.
        is_exact: Whether these are all of which none recomputes more than another.
        least_bytes: What a rank needs if everything is recomputed.
        everything: The way that recomputes everything.
    """

    memories: tuple[Memory, ...]
    is_exact: bool
    least_bytes: int
    everything: Memory


def with_recomputed(plan: Plan, profile: Profile, peaks: Peaks, limit_bytes: int) -> Recomputed:
    """The ways of recomputing modules with which every rank fits.

    Args:
        plan: Which does not fit as it is.
        profile: Of its model.
        peaks: What a way needs.
        limit_bytes: What a rank may use.
    """
    candidates = sorted((piece for piece in profile.modules if _saved_bytes(piece) > 0 and piece.name), key=_price)
    names = [piece.name for piece in candidates]
    everything = _with(plan, names)
    least_bytes = max(peaks(everything))
    if least_bytes > limit_bytes:
        return Recomputed((), True, least_bytes, everything)
    if len(names) <= MOST_SUBSETS:
        fitting: list[tuple[str, ...]] = []
        for subset in subsets(names):
            if not any({*smaller} <= {*subset} for smaller in fitting) and _fits(plan, subset, peaks, limit_bytes):
                fitting.append(subset)
        return Recomputed(tuple(_with(plan, subset) for subset in fitting), True, least_bytes, everything)
    fewest = _fewest(plan, _by_rank(plan, profile, names), peaks, limit_bytes)
    return Recomputed((_with(plan, fewest),), False, least_bytes, everything)


def _by_rank(plan: Plan, profile: Profile, names: Sequence[str]) -> list[list[str]]:
    """The names of the pieces of each rank of axis `pipe`, in the order in which they are given."""
    pipe = plan.mesh.get(PIPE, 1)
    stages = zip(profile.modules, stages_of(plan, profile), strict=True)
    ranks = {piece.name: stage % pipe for piece, stage in stages}
    return [[name for name in names if ranks[name] == rank] for rank in range(pipe)]


def _fewest(plan: Plan, by_rank: Sequence[Sequence[str]], peaks: Peaks, limit_bytes: int) -> list[str]:
    """What each rank recomputes at least, to fit, cheap for its bytes first: by bisection, of all ranks at once."""
    low, high = [0] * len(by_rank), [len(names) for names in by_rank]

    def first(counts: Sequence[int]) -> list[str]:
        return [name for names, count in zip(by_rank, counts, strict=True) for name in names[:count]]

    while low != high:
        middle = [(least + most) // 2 for least, most in zip(low, high, strict=True)]
        for rank, peak_bytes in enumerate(peaks(_with(plan, first(middle)))):
            if peak_bytes <= limit_bytes:
                high[rank] = middle[rank]
            elif low[rank] < high[rank]:
                low[rank] = middle[rank] + 1
    return first(low)


def _with(plan: Plan, names: Sequence[str]) -> Memory:
    return replace(plan.memory, recompute=tuple(names))


def _fits(plan: Plan, names: Sequence[str], peaks: Peaks, limit_bytes: int) -> bool:
    return max(peaks(_with(plan, names))) <= limit_bytes


def _saved_bytes(piece: ModuleProfile) -> int:
    return piece.activations_bytes - sum(piece.reads.values())


def _price(piece: ModuleProfile) -> float:
    """Seconds that a saved byte costs."""
    return piece.forward_s / _saved_bytes(piece)
