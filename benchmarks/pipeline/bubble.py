"""The bubble of each schedule beside what theory says, with layers that sleep instead of computing: no core is needed.

torchrun --nproc-per-node 4 benchmarks/pipeline/bubble.py
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import tulle
from tulle import pipeline
from tulle.comm import gather_values

sys.path.insert(0, str(Path(__file__).parents[1] / "cluster"))

from turns import Sleep  # pyright: ignore[reportMissingImports]

LAYERS = 16


class Sleeper(nn.Module):
    """Forward, the gradient of what came in and that of the weight take as long."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds, self.inner = seconds, nn.Linear(1, 1, bias=False)
        self.inner.weight.register_hook(lambda _: time.sleep(seconds))

    def forward(self, x: Tensor) -> Tensor:
        return Sleep.apply(self.inner(x), self.seconds, self.seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layer-ms", type=float, default=4.0)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    mesh = tulle.init(pipe=-1)
    rows = [
        measure(mesh, options, schedule, groups)
        for schedule, groups in (("gpipe", 1), ("1f1b", 1), ("zb-h1", 1), ("1f1b", 2), ("1f1b", 4))
    ]
    if mesh.rank == 0:
        print("| schedule | stages a rank | bubble, theory | bubble, measured | step, ms | ideal, ms |")
        print("|---|---|---|---|---|---|")
        for row in rows:
            print(
                f"| {row['schedule']} | {row['stages_a_rank']} | {row['theory']:.1%} | {row['bubble']:.1%} | "
                f"{row['step_ms']:.0f} | {row['ideal_ms']:.0f} |"
            )
        if options.out:
            options.out.write_text(json.dumps(rows, indent=1))


def measure(mesh: tulle.Mesh, options: argparse.Namespace, schedule: str, groups: int) -> dict[str, Any]:
    """Median over steps of the mean bubble over ranks."""
    ranks, micro_batches = mesh.size, options.micro_batches
    stages = ranks * groups
    model = nn.Sequential(*(Sleeper(options.layer_ms / 1e3) for _ in range(LAYERS)))
    pipeline.place(model, mesh["pipe"], {str(n): n * stages // LAYERS for n in range(LAYERS)})
    placed = pipeline.placement_of(model)
    assert placed is not None, "it was just placed"

    @pipeline.step(micro_batches=micro_batches, schedule=schedule)
    def train(model: nn.Module, x: Tensor) -> Tensor:
        loss = model(x).sum()
        loss.backward()
        return loss

    idle = (ranks - 1) / (3 if schedule == "zb-h1" else 1)
    x = torch.ones(micro_batches, 1)
    bubbles, times = [], []
    for _ in range(options.steps + 1):
        begin_s = time.perf_counter()
        train(model, x)
        times.append(time.perf_counter() - begin_s)
        bubbles.append(statistics.mean(gather_values(placed.runtime.bubble, mesh["pipe"], label="bubbles")))
    return {
        "schedule": schedule,
        "ranks": ranks,
        "stages_a_rank": groups,
        "micro_batches": micro_batches,
        "theory": idle / (groups * micro_batches + idle),
        "bubble": statistics.median(bubbles[1:]),
        "step_ms": 1e3 * statistics.median(times[1:]),
        "ideal_ms": 3 * options.layer_ms * LAYERS / ranks * micro_batches,
    }


if __name__ == "__main__":
    main()
