"""`Usual`: how the steps of a model run that do not say it themselves, as a plan has it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from torch import nn

from tulle.pipeline.schedule import Schedule


@dataclass(frozen=True, slots=True)
class Usual:
    """How steps run.

    Args:
        micro_batches: Into how many a batch is cut.
        schedule: In which order they are worked on.
    """

    micro_batches: int = 1
    schedule: Schedule = "1f1b"


_usual: WeakKeyDictionary[nn.Module, Usual] = WeakKeyDictionary()


def make_usual(model: nn.Module, usual: Usual) -> None:
    """Have a model's steps run so, where they do not say otherwise."""
    _usual[model] = usual


def usual_of(models: Sequence[nn.Module]) -> Usual:
    """How a step of some models runs."""
    return next((_usual[model] for model in models if model in _usual), Usual())
