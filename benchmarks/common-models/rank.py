"""One rank of a run: trains a model by a way, and has rank 0 print what a step takes."""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
import warnings

import torch
import torch.distributed as dist
from common import MODELS
from torch import nn

import tulle

WARM_STEPS, STEPS = 36, 14
"""`auto` may look anew at what it chose for some thirty steps."""
WAYS = ("ddp", "tulle", "tulle, sample")
MARK = "RESULT "


def main() -> None:
    """Train, and say how long a step takes."""
    name, way, seconds = sys.argv[1], sys.argv[2], float(sys.argv[3])
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    model = MODELS[name]()
    optimizer = model.optimizer()
    rank, begin_s = int(os.environ["RANK"]), time.perf_counter()
    if way == "ddp":
        dist.init_process_group("gloo")
        run = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    else:
        mesh = tulle.init(data=-1)
        sample = model.batch(torch.Generator().manual_seed(rank)) if way == "tulle, sample" else None
        run, _ = tulle.distribute(model, optimizer, mesh, sample=sample, plan="anew" if sample else "auto")
    ready_s, taken_s = time.perf_counter() - begin_s, list[float]()
    end_s = time.perf_counter() + seconds
    for step in range(WARM_STEPS + STEPS):
        batch = model.batch(torch.Generator().manual_seed(1000 * step + rank))
        dist.barrier()
        step_s = time.perf_counter()
        loss = run(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
        dist.barrier()
        taken_s.append(time.perf_counter() - step_s)
        is_over = torch.tensor(float(time.perf_counter() > end_s and step > STEPS // 2))
        dist.all_reduce(is_over)
        if is_over:
            break
    if rank == 0:
        last = taken_s[2:][-STEPS:]
        told = {"ms": round(1e3 * statistics.median(last), 1), "steps": len(taken_s), "ready_s": round(ready_s, 1)}
        print(MARK + json.dumps(told), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
