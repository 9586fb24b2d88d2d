"""Whether the layout search is right: steps under its choices and under others, on four ranks, of two models."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist
import twolayer

import tulle
from tulle import named as tn
from tulle.mesh import Mesh
from tulle.named import layers

LAYERS = 2
batch, length, memory = tn.dims(batch=16, length=64, memory_length=64)
d_model, heads, d_kv, d_ff, vocab = tn.dims(d_model=256, heads=4, d_kv=64, d_ff=1024, vocab=4096)
WIDTHS = layers.Widths(d_model, heads, d_kv, d_ff, vocab)
WORDS = torch.randint(WIDTHS.vocab.size, (batch.size, length.size + 1), generator=torch.Generator().manual_seed(1))


def layouts(rounds: int) -> list[dict[str, object]]:
    """Seconds of a step under the found layouts and under others, of a small language model and a larger one."""
    mesh = tulle.init(data=2, model=2)
    small = tuple(tn.from_torch(one, (twolayer.batch, twolayer.length)) for one in twolayer.tokens())
    return [
        *searched("of 64", twolayer.Named(), small, mesh, lambda rules: twolayer.named_step(mesh, rules)[0], rounds),
        *searched("of 256", _model(), _sample(), mesh, lambda rules: _step(mesh, rules), rounds),
    ]


def searched(
    name: str,
    model: tn.Module,
    sample: tuple[tn.Tensor, ...],
    mesh: Mesh,
    step_of: Callable[[str], Callable[[], object]],
    rounds: int,
) -> list[dict[str, object]]:
    """What the search likes best, and every sixth of what it likes less, each with what a step takes, in turns."""
    told = tn.best_layout(model, sample, mesh, best=40, state_slots=0)
    chosen = [*told[:10], *told[10::6]]
    steps = [(one, step_of(str(one.layout))) for one in chosen]
    times: list[list[float]] = [[] for _ in steps]
    for _, step in steps:
        step()
    for _ in range(rounds):
        for several, (_, step) in zip(times, steps, strict=True):
            dist.barrier()
            begin = time.perf_counter()
            for _ in range(3):
                step()
            several.append((time.perf_counter() - begin) / 3)
    # Of each round what a layout took beside the first choice: what disturbs a round disturbs all of it.
    ratios = [median(s / first for s, first in zip(several, times[0], strict=True)) for several in times]
    return [
        {
            "model": name,
            "layout": str(one.layout),
            "predicted_ms": 1e3 * one.seconds(told.rates),
            "measured_ms": 1e3 * median(several),
            "over_first": ratio,
            "over_fastest": ratio / min(ratios),
        }
        for (one, _), several, ratio in zip(steps, times, ratios, strict=True)
    ]


def _model() -> layers.LanguageModel:
    return layers.LanguageModel(WIDTHS, LAYERS, length, memory)


def _sample() -> tuple[tn.Tensor, tn.Tensor]:
    ids, targets = (tn.from_torch(WORDS[:, begin : begin + length.size], (batch, length)) for begin in (0, 1))
    return ids, targets


def _step(mesh: Mesh, rules: str) -> Callable[[], None]:
    with tn.use(mesh, rules):
        model = _model().init(seed=0)

    def step() -> None:
        with tn.use(mesh, rules):
            tn.mean(model(*_sample())).backward()
            model.zero_grad()

    return step
