"""What a search answers: `told`, the best plan with all that is known of it, or `refusal`, that none fits in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tulle.errors import PlanError
from tulle.plan.explanation import binding, differences, links_of, parts_of
from tulle.plan.found import Found, handicap
from tulle.plan.lower import lowered
from tulle.plan.plan import Plan
from tulle.plan.prediction import Prediction, ms
from tulle.plan.problem import Problem
from tulle.plan.work import DATA
from tulle.simulate import run

WORTH_OFFERING = 0.01
"""Of a step that must be gained for another way to write the loop to be offered."""


def told(problem: Problem, ordered: Sequence[Found], bound_s: float) -> Plan:
    """The best plan, with why its tables are treated as they are, its prediction, and what it offers.

    Args:
        problem: For which it was sought.
        ordered: The best plan of each kind, the best first.
        bound_s: What no plan takes less than, by the score that plans are compared by.

    Raises:
        PlanError: If a step takes no time.
    """
    best = ordered[0]
    if not best.forecast.step_s:
        raise PlanError(
            "by its profile a step takes no time, so that no plan is faster than another: make one with tulle.profile"
        )
    tables = problem.tables(problem.share(best.plan))
    return replace(
        tables.told(best.plan),
        network=tables.network if tables.share.data > 1 else None,
        offers=_offers(problem, best),
        prediction=_prediction(problem, ordered, bound_s),
    )


def _prediction(problem: Problem, ordered: Sequence[Found], bound_s: float) -> Prediction:
    best, second = ordered[0], ordered[1] if len(ordered) > 1 else None
    return Prediction(
        batch=problem.batch,
        ranks=problem.cluster.ranks,
        step_s=best.forecast.step_s,
        parts_s=parts_of(best.forecast),
        links_s=links_of(best.forecast),
        memory_bytes=best.memory_bytes,
        bound_s=min(
            bound_s / handicap(best.plan.schedule, best.plan.memory), *(one.forecast.step_s for one in ordered)
        ),
        runner_up=tuple(differences(best.plan, second.plan)) if second else (),
        runner_up_s=second.forecast.step_s + second.unhidden_s if second else None,
        binding=binding(best.forecast),
        lookahead=problem.profile.lookahead,
    )


def _offers(problem: Problem, best: Found) -> tuple[str, ...]:
    """What a loop through `tulle.lookahead` would gain."""
    if problem.profile.lookahead or not best.plan.placements or best.plan.mesh.get(DATA, 1) == 1:
        return ()
    ahead_s = run(lowered(replace(problem.deal(best.plan), lookahead=True))).step_s
    if ahead_s > (1 - WORTH_OFFERING) * best.forecast.step_s:
        return ()
    return (
        f"for batch in tulle.lookahead(loader): rows of split tables are then told a step ahead, and a step takes "
        f"{ms(ahead_s)} instead of {ms(best.forecast.step_s)}",
    )


def refusal(problem: Problem, least: Plan) -> str:
    """That no plan fits: what the one that needs least needs it for, and how much is missing.

    Args:
        problem: For which there is none.
        least: The plan that needs least.
    """
    fullest = max(problem.footprints(problem.deal(least)), key=lambda one: one.peak_bytes)
    limit_bytes = problem.memory_bytes or 0
    return (
        f"no plan fits in {limit_bytes:,} bytes a rank on {problem.cluster.ranks} ranks, the least needs "
        f"{fullest.peak_bytes:,}, {fullest.peak_bytes - limit_bytes:,} more ("
        + ", ".join(f"{name} {size:,}" for name, size in fullest.parts_bytes().items())
        + "): use more ranks, a smaller batch, or free what the space fixes"
    )
