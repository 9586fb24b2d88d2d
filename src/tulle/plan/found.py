"""`Found`: a plan that was evaluated, what it must gain over others, and which of them count as the same."""

from __future__ import annotations

from dataclasses import dataclass

from tulle.memory import Memory
from tulle.plan.plan import AT_READ, Plan
from tulle.plan.prediction import HANDICAP
from tulle.simulate import Forecast


@dataclass(frozen=True, slots=True)
class Found:
    """A plan that was evaluated.

    Args:
        score_s: Its predicted seconds; with a handicap those that it is compared by.
        plan: The plan.
        forecast: What came of it.
        memory_bytes: By rank of axis `pipe`.
        unhidden_s: What it takes besides, where small exchanges are not as well hidden as the forecast has it.
    """

    score_s: float
    plan: Plan
    forecast: Forecast
    memory_bytes: tuple[int, ...]
    unhidden_s: float = 0.0


def handicap(schedule: str, memory: Memory) -> float:
    """By how much a schedule, or a way of saving memory, must gain."""
    return HANDICAP if schedule == AT_READ or memory.full_shard else 1.0


def decided(plan: Plan) -> tuple[object, ...]:
    """What tells a plan from a runner-up: not the size of its buckets, nor exactly where it is cut."""
    schemes = tuple(sorted(plan.schemes.items()))
    saved = plan.memory.shard_optimizer, plan.memory.full_shard, bool(plan.memory.recompute), plan.memory.precision
    return tuple(plan.mesh.items()), schemes, saved, plan.schedule, plan.micro_batches, bool(plan.tensor_parallel)
