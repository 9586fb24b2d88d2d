"""One rank of one case: trains under DDP or tulle beside one process, and writes what came out."""

from __future__ import annotations

import copy
import json
import math
import os
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from cases import CASES, ROWS, Case
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import tulle

STEPS = 3
RANKS = 2
SAMPLES, LENGTH = 8, 5


def run(number: int, way: str, rank: int, folder: str, timeout_s: float) -> None:
    """Run a case, and write `{rank}.json`: what is wrong, or nothing."""
    warnings.simplefilter("ignore")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=timeout_s),
    )
    try:
        wrong = train(CASES[number], way, rank)
    except Exception as error:  # whatever it is, it is the case's result
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        wrong = f"{type(error).__name__}: {lines[0] if lines else ''}"
    (Path(folder) / f"{rank}.json").write_text(json.dumps(wrong))
    # At once: to leave the group in order, the other rank would have to be there.
    os._exit(0)


def train(case: Case, way: str, rank: int) -> str | None:
    """A few steps; what differs from one process, or None."""
    torch.manual_seed(0)
    model = case.model().to(case.dtype)
    # In half precision torch cannot add sparse gradients up by itself.
    reference = copy.deepcopy(model).to(torch.float32 if case.dtype.itemsize == 2 else case.dtype)
    model, optimizers = distributed(case, way, model)
    theirs = case.optimizers(reference)
    for step in range(STEPS):
        backward(model, case, ids_of(rank, step), rank, step)
        for other in range(RANKS):
            for part in ids_of(other, step).chunk(case.micro_batches):
                (case.loss(reference, part, other, step) / RANKS).backward()
        for optimizer in (*optimizers, *theirs):
            optimizer.step()
            optimizer.zero_grad()
    return difference(getattr(model, "module", model), reference, case.tolerance)


def distributed(case: Case, way: str, model: nn.Module) -> tuple[nn.Module, Sequence[Optimizer]]:
    """The model under DDP or tulle, with its optimizers."""
    if way == "tulle":
        wire_dtype = "fp16" if case.hook else None
        return tulle.distribute(model, case.optimizers(model), tulle.init(data=-1), wire_dtype=wire_dtype)
    wrapped = DistributedDataParallel(model, **case.ddp)
    if case.hook:
        wrapped.register_comm_hook(None, fp16_compress_hook)
    return wrapped, case.optimizers(wrapped)


def backward(model: nn.Module, case: Case, ids: Tensor, rank: int, step: int) -> None:
    """One step's backward passes; all but the last without communication."""
    *first, last = ids.chunk(case.micro_batches)
    without = getattr(model, "no_sync", nullcontext)
    with without():
        for part in first:
            case.loss(model, part, rank, step).backward()
    case.loss(model, last, rank, step).backward()


def ids_of(rank: int, step: int) -> Tensor:
    """`[samples, length]` row numbers, other ones on each rank and in each step."""
    generator = torch.Generator().manual_seed(10 * rank + step)
    return torch.randint(1, ROWS, (SAMPLES, LENGTH), generator=generator)


def difference(model: nn.Module, reference: nn.Module, tolerance: float) -> str | None:
    """The parameter that differs most from one process', or None."""
    worst, name = 0.0, ""
    for (name_here, mine), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        off = (mine - theirs).abs().max().item() / max(theirs.abs().max().item(), 1e-3)
        if off > worst or math.isnan(off):
            worst, name = off, name_here
    return None if worst <= tolerance else f"wrong: {name} differs by {worst:.2g} from one process"
