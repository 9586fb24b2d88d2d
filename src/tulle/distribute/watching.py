"""`watch`: whether steps take what their plan predicts; if not, it is said, recorded, and noted for the next run."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn
from torch.optim import Optimizer

from tulle.comm import now_s
from tulle.plan import Drift, Plan, Shelf
from tulle.profiling.samples import samples_in
from tulle.record import log

logger = logging.getLogger("tulle")

_watched: WeakKeyDictionary[nn.Module, Drift] = WeakKeyDictionary()


def watch(plan: Plan, model: nn.Module, last: Optimizer, *, key: str) -> None:
    """Time steps from the end of one to that of the next. Nothing is sent; one rank is enough.

    Args:
        plan: In force; without a prediction there is nothing to watch.
        model: Whose calls tell of how many samples steps are.
        last: The optimizer whose step ends a step.
        key: Under which the plan is kept; empty if it is not.
    """
    drift = Drift.of(plan)
    if drift is not None:
        _watched[model] = drift
        model.register_forward_pre_hook(_called, with_kwargs=True)
        last.register_step_post_hook(_noting(drift, key))


# A function of the module, not a bound method: a model that is copied or pickled takes its hooks along.
def _called(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    drift = _watched.get(model)
    if drift is not None and model.training:
        drift.called(samples_in((args, kwargs)))


def _noting(drift: Drift, key: str) -> Callable[..., None]:
    ended_s = now_s()

    def note(*_: object) -> None:
        nonlocal ended_s
        began_s, ended_s = ended_s, now_s()
        said = drift.note(ended_s - began_s)
        if said is None:
            return
        logger.warning("%s", said)
        log(plan=said)
        if key:
            with suppress(OSError):  # as where the plan could not be kept
                Shelf.of().note(key, said)

    return note
