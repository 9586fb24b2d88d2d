"""`with_recomputed`: which modules are to recompute their activations so that a plan fits in memory.

The choice is a knapsack: seconds of forward that run again against bytes that are not kept.

Source: Chen et al., *Training Deep Nets with Sublinear Memory Cost* (2016), section 3.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tulle.memory import Memory
from tulle.plan.plan import Plan
from tulle.plan.space import MOST_SUBSETS, subsets
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
    # Fewest by bisection: what is cheap for its bytes first.
    low, high = 1, len(names)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if _fits(plan, names[:middle], peaks, limit_bytes) else (middle + 1, high)
    return Recomputed((_with(plan, names[:low]),), False, least_bytes, everything)


def _with(plan: Plan, names: Sequence[str]) -> Memory:
    return replace(plan.memory, recompute=tuple(names))


def _fits(plan: Plan, names: Sequence[str], peaks: Peaks, limit_bytes: int) -> bool:
    return max(peaks(_with(plan, names))) <= limit_bytes


def _saved_bytes(piece: ModuleProfile) -> int:
    return piece.activations_bytes - sum(piece.reads.values())


def _price(piece: ModuleProfile) -> float:
    """Seconds that a saved byte costs."""
    return piece.forward_s / _saved_bytes(piece)
