"""`call_seconds`: what the run-time of a pipeline takes for each module that it places, beside what the module does."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from tulle.comm import alone, barrier, gather_values, now_s
from tulle.mesh import Axis
from tulle.pipeline import place, step

_MODULES, _MICRO_BATCHES, _REPEATS = 16, 4, 6
_LABEL = "the profile"


def call_seconds(axis: Axis) -> float:
    """Seconds for one placed module and one micro-batch, forward and backward. Every rank of the axis must call it.

    All ranks run the whole program, so what one rank takes that holds all modules is what each would take.

    Args:
        axis: All of whose ranks do it at once.
    """
    with torch.device(axis.device):
        plain, placed = (nn.Sequential(*(nn.Linear(1, 1) for _ in range(_MODULES))) for _ in range(2))
        batch = torch.ones(_MICRO_BATCHES, 1)
    place(placed, alone(axis), {str(number): 0 for number in range(_MODULES)})
    seconds = [[_seconds(partial(_train, model, batch), axis) for model in (plain, placed)] for _ in range(_REPEATS)]
    # Whatever else a machine does only adds to it, and hardly ever to all repeats of one rank.
    plain_s, placed_s = map(min, zip(*seconds, strict=True))
    slowest_s = max(gather_values(placed_s - plain_s, axis, label=_LABEL))
    return max(0.0, slowest_s) / (_MODULES * _MICRO_BATCHES)


@step(micro_batches=_MICRO_BATCHES)
def _train(model: nn.Module, batch: Tensor) -> None:
    model(batch).sum().backward()


def _seconds(work: Callable[[], object], axis: Axis) -> float:
    """Of this rank, while all do it."""
    barrier(axis)
    begin_s = now_s()
    work()
    return now_s() - begin_s
