"""`Usual`: how the steps of a model run that do not say it themselves, as a plan has it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

from torch import nn

from tulle.pipeline.schedule import Schedule

logger = logging.getLogger("tulle")


@dataclass(frozen=True, slots=True)
class Usual:
    """How steps run.

    Args:
        micro_batches: Into how many a batch is cut.
        schedule: In which order they are worked on.
        is_told: Whether the log is to say so, once, if a step cuts its batch into another number: a planner has cut
            the stages for this one.
    """

    micro_batches: int = 1
    schedule: Schedule = "1f1b"
    is_told: bool = False


_usual: WeakKeyDictionary[nn.Module, Usual] = WeakKeyDictionary()


def make_usual(model: nn.Module, usual: Usual) -> None:
    """Have a model's steps run so, where they do not say otherwise."""
    _usual[model] = usual


def usual_of(models: Sequence[nn.Module]) -> Usual:
    """How a step of some models runs."""
    return next((_usual[model] for model in models if model in _usual), Usual())


def micro_batches_of(models: Sequence[nn.Module], asked: int | None) -> int:
    """Into how many micro-batches a step of some models cuts its batch.

    Args:
        models: That it trains.
        asked: How many the step says; None if it does not.
    """
    usual = usual_of(models)
    if asked is not None and asked != usual.micro_batches and usual.is_told:
        logger.warning(
            "the plan cuts stages for micro-batches of which a batch as large as sample= makes %d, and the step makes "
            "%d: give a whole batch as sample=, and leave micro_batches= out of tulle.step to go by the plan",
            usual.micro_batches,
            asked,
        )
        for model in models:
            if model in _usual:
                make_usual(model, replace(_usual[model], is_told=False))
    return usual.micro_batches if asked is None else asked
