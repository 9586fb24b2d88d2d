"""Full sharding on one machine beside torch's: `python benchmarks/memory/one_host.py --ranks 2`.

An encoder trains as replicas (DDP), under torch's `fully_shard` layer by layer and in one piece, and under tulle's
`full_shard`, some steps of each in turn. Writes `one_host.json` beside this file and prints the table of the README.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from spawned import ROW, row_of, save
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

import tulle
from tulle.plan import Memory, Plan

HERE = Path(__file__).parent
STEPS, WARM_TURNS = 5, 2
MODELS = {"12 layers of 64": (12, 64), "8 layers of 256": (8, 256)}
"""Layers and width; batches of 4 x 64."""
WAYS = ("DDP", "fully_shard by layer", "fully_shard in one piece", "tulle")


def run(rank: int, ranks: int, name: str, turns: int, folder: str) -> None:
    """Train all ways in turn; rank 0 writes what it took."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    batch = torch.randn(4, 64, MODELS[name][1], generator=torch.Generator().manual_seed(rank))
    steps = {way: stepper(way, name, batch) for way in WAYS}
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(turns + WARM_TURNS):
        for way, step in steps.items():
            dist.barrier()
            begin_s = time.perf_counter()
            for _ in range(STEPS):
                step()
            dist.barrier()
            seconds[way].append((time.perf_counter() - begin_s) / STEPS)
    if rank == 0:
        row = {"model": name, "ranks": ranks} | {way: times[WARM_TURNS:] for way, times in seconds.items()}
        Path(folder, ROW).write_text(json.dumps(row))
    dist.barrier()


def stepper(way: str, name: str, batch: torch.Tensor) -> Callable[[], None]:
    """What trains the model for a step in one way."""
    torch.manual_seed(0)
    layers, width = MODELS[name]
    layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
    model: nn.Module = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
    if way == "DDP":
        model = DistributedDataParallel(model)
    elif way != "tulle":
        device_mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for one in model.layers if way.endswith("by layer") else ():
            fully_shard(one, mesh=device_mesh)
        fully_shard(model, mesh=device_mesh)
    optimizer = AdamW(model.parameters(), foreach=False)
    if way == "tulle":
        mesh = tulle.init(data=-1)
        plan = Plan(mesh.shape, memory=Memory(full_shard=True))
        model, optimizer = tulle.distribute(model, optimizer, mesh, plan=plan)

    def step() -> None:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def show(row: dict) -> None:
    """A line of the table: milliseconds a step, the median and the least of the turns."""
    times = (f"{1e3 * median(row[way]):.0f} ({1e3 * min(row[way]):.0f})" for way in WAYS)
    print(f"| {row['model']} | {row['ranks']} | {' | '.join(times)} |")


def main() -> None:
    """Start the ranks for each model, save, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--turns", type=int, default=12, help=f"of {STEPS} steps each way")
    options = parser.parse_args()
    rows = []
    print(f"| model | ranks | {' | '.join(f'{way}, ms' for way in WAYS)} |\n|---|---|{'---|' * len(WAYS)}")
    for ranks in options.ranks:
        for name in MODELS:
            rows.append(row_of(run, ranks, name, options.turns))
            show(rows[-1])
    save(HERE / "one_host.json", rows)


if __name__ == "__main__":
    main()
