"""One rank: the three gradients of a tied table, gathered as Horovod did, reduced, and as tulle's `auto` sums them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TypedDict

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD

import tulle
from tulle.comm import all_gather_parts, all_reduce
from tulle.mesh import Axis

ROWS, WIDTH = 33_708, 1_024
"""Transformer-big's shared table of English and German subwords."""
TOKENS = 5_000
"""Of each side in one process' batch."""
SCALE = 10.24
"""The tensors that are really exchanged are so many times narrower: 100 columns."""


class Held(TypedDict):
    """Bytes of the gradient that one rank holds, by way, at the reduced width."""

    gathered_bytes: int
    reduced_bytes: int
    auto_bytes: int
    layout: str


def gather_bytes(ranks: int, width: int) -> int:
    """Of the dense gradient and both lookups', taken for sparse, end to end, of all ranks (values, float32)."""
    return ranks * (ROWS + 2 * TOKENS) * width * 4


def densify_bytes(width: int) -> int:
    """Of the table."""
    return ROWS * width * 4


class Tied(nn.Module):
    """One table for source words, target words and the output layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.words = nn.Embedding(ROWS, width, sparse=True)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """A loss of `[tokens]` and `[tokens]` that depends on the whole table, as a softmax does."""
        hidden = self.words(source).mean(0) + self.words(target).mean(0)
        return torch.logsumexp(self.words.weight @ hidden, dim=0)


def run(rank: int, ranks: int, folder: str) -> None:
    """Exchange the gradients in each way; rank 0 writes what it holds."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=ranks)
    axis = tulle.init(data=-1)["data"]
    width = round(WIDTH / SCALE)
    values = torch.ones(ROWS + 2 * TOKENS, width)
    lengths = [len(values)] * ranks
    gathered_bytes = all_gather_parts(values, lengths, axis, label="assumed sparse").wait().nbytes
    reduced_bytes = all_reduce(torch.ones(ROWS, width), axis, label="densified").wait().nbytes
    gradient = train(axis, width)
    held: Held = {
        "gathered_bytes": gathered_bytes,
        "reduced_bytes": reduced_bytes,
        "auto_bytes": gradient.nbytes if gradient.layout == torch.strided else gradient._values().nbytes,
        "layout": "dense" if gradient.layout == torch.strided else "sparse",
    }
    if rank == 0:
        (Path(folder) / "held.json").write_text(json.dumps(held))
    dist.barrier()
    dist.destroy_process_group()


def train(axis: Axis, width: int) -> Tensor:
    """The gradient that `plan="auto"` gives."""
    torch.manual_seed(axis.rank)
    model = Tied(width)
    model, _ = tulle.distribute(model, SGD(model.parameters(), lr=0.1), tulle.init(data=-1))
    model(torch.randint(ROWS, (TOKENS,)), torch.randint(ROWS, (TOKENS,))).backward()
    gradient = model.words.weight.grad
    assert gradient is not None, "the loss depends on the table"
    return gradient
