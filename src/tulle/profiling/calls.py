"""`with_run_time`: what the run-time of a pipeline takes, beside what modules do.

All ranks run the whole program of each micro-batch: its placed modules, and the operations between them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from statistics import median

import torch
from torch import Tensor, nn

from tulle.comm import alone, barrier, gather_values, now_s
from tulle.mesh import Axis
from tulle.pipeline import place, step
from tulle.workload import Machine

_FEW, _MANY = 4, 16
"""Modules of a model."""
_KINDS = (_FEW, 0), (_MANY, 0), (_MANY, 2)
"""How many modules, and operations after each, of the models that are timed."""
_MICRO_BATCHES, _REPEATS = 4, 10
_COLD = 2.0
"""What it takes among modules that compute, by what it takes in a chain that fits in the nearest cache: of GPT-2."""
_LABEL = "the profile"


class _Chain(nn.Module):
    """Modules one after the other, with so many operations between two.

    Args:
        length: Of the chain.
        operations: After each module.
    """

    def __init__(self, length: int, operations: int) -> None:
        super().__init__()
        self.links = nn.ModuleList(nn.Linear(1, 1) for _ in range(length))
        self._operations = operations

    def forward(self, x: Tensor) -> Tensor:
        for link in self.links:
            x = link(x)
            for _ in range(self._operations):
                x = x + 1
        return x


def with_run_time(machine: Machine, axis: Axis) -> Machine:
    """A machine with what the run-time of a pipeline takes on it, measured. Every rank of the axis must call it.

    What one rank takes that holds all modules is what each would take.

    Args:
        machine: What else is known of it.
        axis: All of whose ranks do it at once.
    """
    with torch.device(axis.device):
        plain, placed = ([_Chain(*kind) for kind in _KINDS] for _ in range(2))
        batch = torch.ones(_MICRO_BATCHES, 1)
    for model in placed:
        place(model, alone(axis), {f"links.{number}": 0 for number in range(len(model.links))})
    # In turns, because a machine is now faster and now slower. Whatever else it does only adds to what is looked for,
    # and hardly ever to all repeats of a rank; where it does, the other ranks have seen it without.
    seconds = [[_seconds(partial(_train, one, batch), axis) for one in (*plain, *placed)] for _ in range(_REPEATS)]
    fastest_s = [min(of_model) for of_model in zip(*seconds, strict=True)]
    without_s, with_s = fastest_s[: len(plain)], fastest_s[len(plain) :]
    beside_s = [one_s - other_s for one_s, other_s in zip(with_s, without_s, strict=True)]
    of_ranks = gather_values(beside_s, axis, label=_LABEL)
    few_s, many_s, mixed_s = (median(one_s) / _MICRO_BATCHES for one_s in zip(*of_ranks, strict=True))
    call_s = max(0.0, many_s - few_s) / (_MANY - _FEW)
    return replace(
        machine,
        call_s=_COLD * call_s,
        operation_s=_COLD * max(0.0, mixed_s - many_s) / (2 * _MANY),
        micro_batch_s=_COLD * max(0.0, few_s - _FEW * call_s),
    )


@step(micro_batches=_MICRO_BATCHES)
def _train(model: nn.Module, batch: Tensor) -> None:
    model(batch).sum().backward()


def _seconds(work: Callable[[], object], axis: Axis) -> float:
    """Of this rank, while all do it."""
    barrier(axis)
    begin_s = now_s()
    work()
    return now_s() - begin_s
