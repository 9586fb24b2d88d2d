"""Peak memory of each rank of a mesh 2 x 2 x 2 against one process, each way of saving memory on and off.

`python benchmarks/memory/axes.py` starts 8 processes, writes `axes.json` beside this file and prints the table of
docs/memory.md. The peak is what all tensors take at a time: what stands between steps, by the garbage collector's list
of tensors, and the most that operations of a step add to it (`tulle.memory.LiveBytes`). Bytes repeat exactly.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import platform
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypedDict

import torch
from torch import Tensor, nn
from torch.nn import functional

import tulle
from tulle.comm import BackgroundThread, Job, gather_values
from tulle.estimate import estimate
from tulle.memory import LiveBytes
from tulle.memory.estimate import tensor_bytes
from tulle.mesh import axis_of
from tulle.plan import Memory, Plan

HERE = Path(__file__).parent
_SUBMIT = BackgroundThread.submit
WORDS, WIDTH, HEADS, LAYERS, LENGTH, SAMPLES, MICRO_BATCHES = 2_048, 256, 8, 8, 64, 16, 4
"""Samples of a step, over all replicas."""
MESH = {"data": 2, "pipe": 2, "model": 2}
STAGES = {"words": 0, "out": 1} | {f"layers.{number}": number * 2 // LAYERS for number in range(LAYERS)}
NAMES = tuple(f"layers.{number}" for number in range(LAYERS))
WAYS = {
    "nothing": Memory(),
    "shard_optimizer": Memory(shard_optimizer=True),
    "full_shard": Memory(full_shard=True),
    "recompute": Memory(recompute=NAMES),
    "bf16": Memory(shard_optimizer=True, precision="bf16"),
    "full_shard, recompute": Memory(full_shard=True, recompute=NAMES),
    "full_shard, recompute, bf16": Memory(full_shard=True, recompute=NAMES, precision="bf16"),
}


class Row(TypedDict):
    """What one way takes.

    Args:
        way: Its name.
        standing_bytes: Of each rank, between steps.
        peak_bytes: Of each rank, within one.
        estimate_bytes: Of each rank of axis `pipe`, by `tulle.estimate`, before anything was distributed.
        losses: Of each rank.
    """

    way: str
    standing_bytes: list[int]
    peak_bytes: list[int]
    estimate_bytes: list[int]
    losses: list[float]


class Language(nn.Module):
    """Predicts the next word; gives the mean loss of `[samples, length + 1]` words."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, 0.0, batch_first=True) for _ in range(LAYERS)
        )
        self.out = nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        """The mean loss."""
        x = self.words(words[:, :-1])
        for layer in self.layers:
            x = layer(x)
        return functional.cross_entropy(self.out(x).flatten(0, 1).float(), words[:, 1:].flatten())


def main() -> None:
    """Run one process and eight, save, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    options = parser.parse_args()
    [alone] = spawned({"data": 1}, ["nothing"])
    rows = spawned(MESH, options.ways)
    machine = {"python": platform.python_version(), "torch": torch.__version__, "cores": os.cpu_count()}
    model = {"words": WORDS, "width": WIDTH, "layers": LAYERS, "length": LENGTH, "samples": SAMPLES}
    results = {"machine": machine, "command": " ".join(["python", *sys.argv]), "mesh": MESH, "model": model}
    results |= {"micro_batches": MICRO_BATCHES, "one process": alone, "rows": rows}
    (HERE / "axes.json").write_text(json.dumps(results, indent=1) + "\n")
    show(alone, rows)


def spawned(mesh: dict[str, int], ways: list[str]) -> list[Row]:
    """What so many processes took, by rank 0."""
    ranks = torch.tensor([*mesh.values()]).prod().item()
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        processes = [context.Process(target=run, args=(n, ranks, mesh, ways, folder)) for n in range(int(ranks))]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        if any(process.exitcode for process in processes):
            raise SystemExit(f"a rank of {mesh} ended with exit code {[process.exitcode for process in processes]}")
        return json.loads((Path(folder) / "rows.json").read_text())


def run(rank: int, ranks: int, mesh: dict[str, int], ways: list[str], folder: str) -> None:
    """One rank: all ways, one after the other."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    rows = [one(way, mesh) for way in ways]
    if rank == 0:
        (Path(folder) / "rows.json").write_text(json.dumps(rows))
    torch.distributed.barrier()


def one(way: str, shape: dict[str, int]) -> Row:
    """Train two steps of one way; the second is counted."""
    mesh = tulle.init(data=shape["data"], pipe=shape.get("pipe", 1), model=shape.get("model", 1))
    torch.manual_seed(0)
    model = Language()
    optimizer = torch.optim.AdamW(model.parameters())
    stages = STAGES if "pipe" in shape else {}
    plan = Plan(mesh.shape, stages=stages, micro_batches=MICRO_BATCHES, memory=WAYS[way], tensor_parallel=parts(shape))
    words = torch.randint(WORDS, (SAMPLES, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    batch = words.chunk(shape["data"])[mesh["data"].rank]
    estimated = [rank.peak_bytes for rank in estimate(model, batch, shape, plan).ranks]
    tulle.distribute(model, optimizer, mesh, plan=plan)
    live = LiveBytes("cpu")
    count_background_threads(live)

    @tulle.step(micro_batches=MICRO_BATCHES)
    def train(model: nn.Module, batch: Tensor) -> Tensor:
        with live:
            loss = model(batch)
            loss.backward()
        return loss

    def step() -> float:
        loss = train(model, batch).mean().item()
        with live:
            optimizer.step()
        optimizer.zero_grad()
        return loss

    step()
    standing_bytes = standing()
    live.restart_peak()
    before_bytes = live.now_bytes
    loss = step()
    found = (standing_bytes, standing_bytes + live.peak_bytes - before_bytes, loss)
    heard = gather_values(found, axis_of(), label="peaks")
    return Row(
        way=way,
        standing_bytes=[standing_bytes for standing_bytes, _, _ in heard],
        peak_bytes=[peak_bytes for _, peak_bytes, _ in heard],
        estimate_bytes=estimated,
        losses=[loss for _, _, loss in heard],
    )


def count_background_threads(live: LiveBytes) -> None:
    """Count what threads that send make, too: an operation is counted in the thread that asks for it."""

    def submit(background: BackgroundThread, work: Callable[[], Any]) -> Job[Any]:
        def counted() -> Any:
            with live:
                return work()

        return _SUBMIT(background, counted)

    BackgroundThread.submit = submit  # pyright: ignore[reportAttributeAccessIssue]


def parts(shape: dict[str, int]) -> tuple[str, ...]:
    """What is split over axis `model`."""
    return NAMES if shape.get("model", 1) > 1 else ()


def standing() -> int:
    """Bytes of all tensors that are there."""
    gc.collect()
    tensors = [one for one in gc.get_objects() if issubclass(type(one), Tensor)]  # some objects warn when asked more
    return tensor_bytes(one for one in tensors if one.device.type == "cpu" and one.layout == torch.strided)


def show(alone: Row, rows: list[Row]) -> None:
    """Print the table."""
    [whole] = alone["peak_bytes"]
    print("| way | first stage, MB | last stage, MB | of one process | between steps, MB | estimate / peak |")
    print("|---|---|---|---|---|---|")
    ratio = alone["estimate_bytes"][0] / whole
    print(f"| one process | {whole / 1e6:.1f} | | 1.00 | {alone['standing_bytes'][0] / 1e6:.1f} | {ratio:.2f} |")
    for row in rows:
        by_stage = [max(row["peak_bytes"][rank] for rank in range(8) if rank // 2 % 2 == stage) for stage in range(2)]
        ratios = ", ".join(f"{e / peak:.2f}" for e, peak in zip(row["estimate_bytes"], by_stage, strict=True))
        print(
            f"| {row['way']} | {by_stage[0] / 1e6:.1f} | {by_stage[1] / 1e6:.1f} | {max(by_stage) / whole:.2f} "
            f"| {max(row['standing_bytes']) / 1e6:.1f} | {ratios} |"
        )


if __name__ == "__main__":
    main()
