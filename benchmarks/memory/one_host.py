"""Full sharding on one machine beside torch's: `python benchmarks/memory/one_host.py --ranks 2`.

An encoder trains as replicas (DDP), under torch's `fully_shard` layer by layer and in one piece, and under tulle's
`full_shard`, some steps of each in turn. Writes `one_host.json` beside this file and prints the table of the README.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from spawned import compare, in_turns, write_row
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

import tulle
from tulle.plan import Memory, Plan

HERE = Path(__file__).parent
WARM_TURNS = 2
MODELS = {"12 layers of 64": (12, 64), "8 layers of 256": (8, 256)}
"""Layers and width; batches of 4 x 64."""
WAYS = ("DDP", "fully_shard by layer", "fully_shard in one piece", "tulle")


def run(rank: int, ranks: int, name: str, turns: int, folder: str) -> None:
    """Train all ways in turn; rank 0 writes what it took."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    batch = torch.randn(4, 64, MODELS[name][1], generator=torch.Generator().manual_seed(rank))
    steps = {way: stepper(way, name, batch) for way in WAYS}
    seconds = in_turns(steps, turns, warm=WARM_TURNS)
    write_row(folder, rank, {"model": name, "ranks": ranks} | seconds)


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
    print(f"| model | ranks | {' | '.join(f'{way}, ms' for way in WAYS)} |\n|---|---|{'---|' * len(WAYS)}")
    compare(run, MODELS, show, doc=__doc__, turns=12, to=HERE / "one_host.json")


if __name__ == "__main__":
    main()
