"""Steps a second of a pipeline beside `torch.distributed.pipelining`'s, with the same stages, in interleaved runs.

torchrun --nproc-per-node 4 benchmarks/pipeline/speed.py --schedules 1f1b zb-h1 --out speed.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleavedZeroBubble,
)

import tulle
from tulle import pipeline

SCHEDULES = {
    "1f1b": Schedule1F1B,
    "eager-1f1b": Schedule1F1B,
    "zb-h1": ScheduleInterleavedZeroBubble,
    "gpipe": ScheduleGPipe,
}
"""Ours, and torch's that is most like it."""


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(width, 4 * width), nn.Linear(4 * width, width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Blocks(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Attend(nn.Module):
    """A layer of GPT-2: causal attention and a feed-forward part, each with its norm before it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads, self.norm, self.feed = width // 64, nn.LayerNorm(width), Block(width)
        self.project, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.project(self.norm(x)).chunk(3, dim=-1)
        heads = [part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts]
        mixed = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        return self.feed(x + self.out(mixed.transpose(1, 2).flatten(2)))


class Gpt(Blocks):
    """The layers of GPT-2; embeddings and output are left out, as torch's stages take one shape each."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__(width, 0)
        self.layers = nn.ModuleList(Attend(width) for _ in range(depth))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=["blocks", "gpt2"], default="blocks")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--depth", type=int, default=16)
    parser.add_argument("--samples", type=int, default=128, help="of a micro-batch")
    parser.add_argument("--length", type=int, default=64, help="of a sequence, for gpt2")
    parser.add_argument("--micro-batches", type=int, default=16)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--schedules", choices=list(SCHEDULES), nargs="+", default=["1f1b"])
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def main() -> None:
    options = parse()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    mesh = tulle.init(pipe=-1)
    shape = (options.length, options.width) if options.model == "gpt2" else (options.width,)
    x = torch.randn(options.samples * options.micro_batches, *shape, generator=torch.Generator().manual_seed(0))
    kinds = [Schedule1F1B, *(SCHEDULES[schedule] for schedule in options.schedules)]
    rivals = {kind.__name__: kind for kind in kinds}
    steps = {name: of_torch(options, mesh, x, schedule) for name, schedule in rivals.items()}
    bubbles: dict[str, list[float]] = {}
    for schedule in options.schedules:
        steps[schedule] = of_tulle(options, mesh, x, schedule, bubbles.setdefault(schedule, []))
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(options.steps + 1):
        for name, step in steps.items():
            dist.barrier()
            begin_s = time.perf_counter()
            step()
            dist.barrier()
            times[name].append(time.perf_counter() - begin_s)
    result = {
        **{name: value for name, value in vars(options).items() if name != "out"},
        "ranks": mesh.size,
        "torch_version": torch.__version__,
        "seconds": {name: sorted(round(value, 4) for value in values[1:]) for name, values in times.items()},
        "median_ratios": {
            rival: {name: middle_of_ratios(times[name], times[rival]) for name in steps if name != rival}
            for rival in rivals
        },
        "bubble_of_rank_0": {name: round(statistics.median(values[1:]), 3) for name, values in bubbles.items()},
    }
    if mesh.rank == 0:
        print(json.dumps(result))
        if options.out:
            options.out.parent.mkdir(exist_ok=True)
            options.out.write_text(json.dumps(result, indent=1))


def middle_of_ratios(times_s: Sequence[float], others_s: Sequence[float]) -> float:
    """Of each round but the first."""
    return round(statistics.median(a / b for a, b in zip(times_s[1:], others_s[1:], strict=True)), 3)


def build(options: argparse.Namespace) -> Blocks:
    torch.manual_seed(0)
    return (Gpt if options.model == "gpt2" else Blocks)(options.width, options.depth)


def of_torch(options: argparse.Namespace, mesh: tulle.Mesh, x: Tensor, kind: Any) -> Callable[[], object]:
    """A step of one of torch's own schedules, over the same stages."""
    share = options.depth // mesh.size
    layers = list(build(options).layers)[mesh.rank * share : (mesh.rank + 1) * share]
    stage = PipelineStage(nn.Sequential(*layers), mesh.rank, mesh.size, torch.device("cpu"))
    given = [stage] if kind is ScheduleInterleavedZeroBubble else stage
    schedule = cast("Any", kind)(given, options.micro_batches, loss_fn=lambda y, _: y.pow(2).mean())
    if mesh.rank == 0:
        return lambda: schedule.step(x)
    if mesh.rank < mesh.size - 1:
        return schedule.step
    return lambda: schedule.step(target=torch.zeros(len(x)), losses=[])


def of_tulle(
    options: argparse.Namespace, mesh: tulle.Mesh, x: Tensor, schedule: str, bubbles: list[float]
) -> Callable[[], object]:
    """The same with placed modules; notes the bubble of each step."""
    share = options.depth // mesh.size
    model = pipeline.place(build(options), mesh["pipe"], {f"layers.{n}": n // share for n in range(options.depth)})
    placed = pipeline.placement_of(model)
    assert placed is not None, "it was just placed"

    @pipeline.step(micro_batches=options.micro_batches, schedule=schedule)
    def train(model: nn.Module, x: Tensor) -> Tensor:
        loss = model(x).pow(2).mean()
        loss.backward()
        return loss

    def step() -> None:
        train(model, x)
        bubbles.append(placed.runtime.bubble)

    return step


if __name__ == "__main__":
    main()
