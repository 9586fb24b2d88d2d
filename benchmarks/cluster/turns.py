"""What ranks do in a race: ways to train one model, whose work is in part a sleep, take turns in one set of processes.

What else the machine does then hits all ways alike. `race.py` starts them.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

import tulle

JOB: dict[str, Callable[[str], float]] = {
    "layers": int,
    "width": int,
    "layer_ms": float,
    "samples": int,
    "turns": int,
    "steps": int,
}
"""What a race is told on the command line."""


class Sleep(torch.autograd.Function):
    """Stands for the work of an accelerator: takes its time, and twice that in backward if nothing is said, no core."""

    @staticmethod
    def forward(ctx: FunctionCtx, hidden: Tensor, seconds: float, backward_s: float | None = None) -> Tensor:
        """`hidden`, later."""
        ctx.seconds = 2 * seconds if backward_s is None else backward_s  # type: ignore[attr-defined]
        time.sleep(seconds)
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor) -> tuple[Tensor, None, None]:
        """The gradient, later still."""
        time.sleep(ctx.seconds)  # type: ignore[attr-defined]
        return gradients[0], None, None


class Run(Protocol):
    """The model trained in one way."""

    def steps(self, count: int) -> dict[str, float]:
        """Train so many steps; what one of them took, by name."""
        ...

    def weight(self) -> Tensor:
        """One of the weights, whole."""
        ...


def option(name: str) -> str:
    """Of a part of a job, on the command line."""
    return f"--{name.replace('_', '-')}"


def take_turns(ways: Iterable[str], start: Callable[[str, argparse.Namespace, tulle.Mesh], Run]) -> None:
    """Train in every way, in turns; rank 0 prints what a step took, by way and turn. Every rank must call it."""
    parser = argparse.ArgumentParser()
    for name, kind in JOB.items():
        parser.add_argument(option(name), type=kind, required=True)
    arguments = parser.parse_args()
    mesh = tulle.init(data=-1)
    runs = {way: start(way, arguments, mesh) for way in ways}
    found: dict[str, list[dict[str, float]]] = {way: [] for way in runs}
    for _ in range(arguments.turns):
        for way, run in runs.items():
            found[way].append(run.steps(arguments.steps))
    first, *others = [run.weight() for run in runs.values()]
    difference = max(float((first - other).abs().max()) for other in others)
    if mesh.rank == 0:
        print(json.dumps({"ways": found, "largest difference of a weight": difference}), flush=True)
