"""`watch`: whether a model's steps take what its plan predicts; if not, it is said, and noted for the next run."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress

from torch.optim import Optimizer

from tulle.comm import now_s
from tulle.plan import Drift, Plan, Shelf

logger = logging.getLogger("tulle")


def watch(plan: Plan, last: Optimizer, *, key: str, is_told: bool) -> None:
    """Time steps from the end of one to that of the next. Nothing is sent; one rank is enough.

    Args:
        plan: In force; without a prediction there is nothing to watch.
        last: The optimizer whose step ends a step.
        key: Under which the plan is kept; empty if it is not.
        is_told: Whether somebody else tells of it, a run's record say.
    """
    drift = Drift.of(plan)
    if drift is not None:
        last.register_step_post_hook(_noting(drift, key, is_told=is_told))


def _noting(drift: Drift, key: str, *, is_told: bool) -> Callable[..., None]:
    ended_s: float | None = None

    def note(*_: object) -> None:
        nonlocal ended_s
        began_s, ended_s = ended_s, now_s()
        said = drift.note(ended_s - began_s) if began_s is not None else None
        if said is None:
            return
        if not is_told:
            logger.warning("%s", said)
        if key:
            with suppress(OSError):  # as where the plan could not be kept
                Shelf.of().note(key, said)

    return note
