"""Steps a second of a pipeline beside `torch.distributed.pipelining`'s, with the same stages, in interleaved runs.

    python benchmarks/pipeline/speed.py --schedules 1f1b zb-h1 --out speed.json

Each rival has processes of its own, as its users have, so that none pays for the memory and the caches of another;
their steps take turns, one rival's at a time, while the processes of the others sleep.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import TCPStore
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
TORCHS = {kind.__name__: kind for kind in SCHEDULES.values()}
A_STEP_AT_MOST = timedelta(minutes=3)
"""With the start of the processes before the first."""


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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--model", choices=["blocks", "gpt2"], default="blocks")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--depth", type=int, default=16)
    parser.add_argument("--samples", type=int, default=128, help="of a micro-batch")
    parser.add_argument("--length", type=int, default=64, help="of a sequence, for gpt2")
    parser.add_argument("--micro-batches", type=int, default=16)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--schedules", choices=list(SCHEDULES), nargs="+", default=["1f1b"])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rival", help=argparse.SUPPRESS)  # what this process is a rank of
    parser.add_argument("--turns", type=int, help=argparse.SUPPRESS)  # the port at which it hears of its turns
    return parser.parse_args()


def main() -> None:
    options = parse()
    warnings.simplefilter("ignore")
    if options.rival is None:
        compare(options)
    else:
        take_turns(options)


def compare(options: argparse.Namespace) -> None:
    """Start the ranks of all rivals, give each its turns, and say what they took."""
    theirs = [kind.__name__ for kind in (Schedule1F1B, *(SCHEDULES[schedule] for schedule in options.schedules))]
    rivals = list(dict.fromkeys([*theirs, *options.schedules]))
    store = turns_at(0, is_master=True)
    steps: dict[str, list[dict[str, float]]] = {rival: [] for rival in rivals}
    with ExitStack() as jobs:
        started = {rival: jobs.enter_context(start(rival, options.ranks, store.port)) for rival in rivals}
        try:
            for turn in range(options.steps + 1):
                for rival, job in started.items():
                    store.set(f"begin {rival} {turn}", "")
                    steps[rival].append(json.loads(outcome(store, f"end {rival} {turn}", job)))
        except BaseException:
            for job in started.values():
                job.terminate()
            raise
    times = {rival: [step["seconds"] for step in taken[1:]] for rival, taken in steps.items()}
    result = {
        **{name: value for name, value in vars(options).items() if name not in ("out", "rival", "turns")},
        "torch_version": torch.__version__,
        "seconds": {name: sorted(round(value, 4) for value in values) for name, values in times.items()},
        "median_ratios": {
            rival: {name: middle_of_ratios(times[name], times[rival]) for name in times if name != rival}
            for rival in dict.fromkeys(theirs)
        },
        "bubble_of_rank_0": {
            rival: round(statistics.median(step["bubble"] for step in steps[rival][1:]), 3)
            for rival in options.schedules
        },
    }
    print(json.dumps(result))
    if options.out:
        options.out.parent.mkdir(exist_ok=True)
        options.out.write_text(json.dumps(result, indent=1))


def start(rival: str, ranks: int, port: int) -> subprocess.Popen[bytes]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command = [*launcher, __file__, *sys.argv[1:], f"--rival={rival}", f"--turns={port}"]
    return subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"})


def turns_at(port: int, *, is_master: bool) -> TCPStore:
    return TCPStore("127.0.0.1", port, is_master=is_master, timeout=A_STEP_AT_MOST, wait_for_workers=False)


def outcome(store: TCPStore, key: str, job: subprocess.Popen[bytes]) -> bytes:
    """Of a step, when it is there."""
    while not store.check([key]):
        if job.poll() is not None:
            sys.exit(f"the ranks of a rival ended with {job.returncode} before they came to {key!r}")
        time.sleep(0.01)
    return store.get(key)


def take_turns(options: argparse.Namespace) -> None:
    """Be a rank of a rival: take a step when all others of it do, which is when the first hears that it may."""
    torch.set_num_threads(1)
    mesh = tulle.init(pipe=-1)
    shape = (options.length, options.width) if options.model == "gpt2" else (options.width,)
    x = torch.randn(options.samples * options.micro_batches, *shape, generator=torch.Generator().manual_seed(0))
    bubbles = [0.0]
    if options.rival in TORCHS:
        _, step = of_torch(options, mesh, x, TORCHS[options.rival])
    else:
        _, step = of_tulle(options, mesh, x, options.rival, bubbles)
    store = turns_at(options.turns, is_master=False)
    for turn in range(options.steps + 1):
        store.wait([f"begin {options.rival} {turn}"], A_STEP_AT_MOST)
        dist.barrier()
        begin_s = time.perf_counter()
        step()
        dist.barrier()
        taken: Mapping[str, float] = {"seconds": time.perf_counter() - begin_s, "bubble": bubbles[-1]}
        if mesh.rank == 0:
            store.set(f"end {options.rival} {turn}", json.dumps(taken))


def middle_of_ratios(times_s: Sequence[float], others_s: Sequence[float]) -> float:
    """Of each round."""
    return round(statistics.median(a / b for a, b in zip(times_s, others_s, strict=True)), 3)


def build(options: argparse.Namespace, device: torch.device) -> Blocks:
    torch.manual_seed(0)
    return (Gpt if options.model == "gpt2" else Blocks)(options.width, options.depth).to(device)


def of_torch(
    options: argparse.Namespace, mesh: tulle.Mesh, x: Tensor, kind: Any
) -> tuple[nn.Module, Callable[[], object]]:
    """This rank's layers, and a step of one of torch's own schedules, over the same stages."""
    share = options.depth // mesh.size
    layers = nn.Sequential(*list(build(options, mesh.device).layers)[mesh.rank * share : (mesh.rank + 1) * share])
    stage = PipelineStage(layers, mesh.rank, mesh.size, mesh.device)
    given = [stage] if kind is ScheduleInterleavedZeroBubble else stage
    schedule = cast("Any", kind)(given, options.micro_batches, loss_fn=lambda y, _: y.pow(2).mean())
    if mesh.rank == 0:
        return layers, lambda: schedule.step(x)
    if mesh.rank < mesh.size - 1:
        return layers, schedule.step
    target = torch.zeros(len(x), device=x.device)
    return layers, lambda: schedule.step(target=target, losses=[])


def of_tulle(
    options: argparse.Namespace, mesh: tulle.Mesh, x: Tensor, schedule: str, bubbles: list[float]
) -> tuple[nn.Module, Callable[[], object]]:
    """The same with placed modules, of the whole model; notes the bubble of each step."""
    share = options.depth // mesh.size
    model = pipeline.place(
        build(options, mesh.device), mesh["pipe"], {f"layers.{n}": n // share for n in range(options.depth)}
    )
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

    return model, step


if __name__ == "__main__":
    main()
