"""Split layers against DTensor's `parallelize_module`: `python benchmarks/memory/split_layers.py --ranks 2`.

Both train the same feed-forward networks, step by step in turn; ratios are of steps that stand beside each other.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import time
from statistics import quantiles

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import tulle
from tulle import tensor_parallel

STEPS, WARM = 40, 5


class Block(nn.Module):
    """A norm and a feed-forward network."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(256), nn.Linear(256, 1024), nn.Linear(1024, 256)

    def forward(self, x: Tensor) -> Tensor:
        """`[samples, length, 256]` to the same."""
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def make() -> nn.Sequential:
    """The same weights whenever it is called."""
    torch.manual_seed(0)
    return nn.Sequential(*[Block() for _ in range(4)])


def run(rank: int, ranks: int, folder: str) -> None:
    """Train both in turn; rank 0 prints."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    mesh = tulle.init(model=ranks)
    ours, theirs = make(), make()
    tensor_parallel.apply(ours, mesh["model"], select={"*.up": "column", "*.down": "row"})
    for block in theirs:
        parallelize_module(block, mesh.device_mesh(), {"up": ColwiseParallel(), "down": RowwiseParallel()})
    x = torch.randn(8, 64, 256)
    pairs = [(model, torch.optim.AdamW(model.parameters(), lr=1e-3)) for model in (ours, theirs)]
    ratios = []
    for _ in range(STEPS):
        taken = []
        for model, optimizer in pairs:
            dist.barrier()
            begin_s = time.perf_counter()
            model(x).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            taken.append(time.perf_counter() - begin_s)
        ratios.append(taken[1] / taken[0])
    mine = ours.state_dict()
    other = {n: v.full_tensor() if isinstance(v, DTensor) else v for n, v in theirs.state_dict().items()}
    worst = max((mine[name] - other[name]).abs().max().item() for name in mine)
    if rank == 0:
        low, middle, high = quantiles(ratios[WARM:], n=4)
        print(f"{ranks} ranks: DTensor / ours {middle:.2f} (quartiles {low:.2f} to {high:.2f}), apart by {worst:.1e}")
    dist.barrier()


def main() -> None:
    """Start the ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    ranks = parser.parse_args().ranks
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        processes = [context.Process(target=run, args=(rank, ranks, folder), daemon=True) for rank in range(ranks)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()


if __name__ == "__main__":
    main()
