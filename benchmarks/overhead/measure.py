"""One measurement on the ranks that torchrun started: two ways to train one model, in turn, as ratios of pairs.

Ways: `plain` (no library), `ddp` (torch's DistributedDataParallel), `ddp-hook` (with `tulle.sync.ddp_hook`: nccl sends
no sparse gradients), `tulle`. On GPUs if there is one for each rank. With `--memory WAY` only that way is trained, and
the peak memory of each rank is what is reported.
"""

from __future__ import annotations

import argparse
import itertools
import json
import resource
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median, quantiles

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD
from workloads import WORKLOADS, Workload

import tulle
from tulle.comm import traffic

_WARM_STEPS = 10
"""Gradients are measured in the 1st, 2nd, 4th and 8th, from which a long run has next to nothing."""


def main() -> None:
    """Measure what the options ask for, and write it as JSON from rank 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("--pair", nargs=2, metavar=("WAY", "BASELINE"))
    parser.add_argument("--memory", metavar="WAY")
    parser.add_argument("--rounds", type=int, default=20, help="pairs to time")
    parser.add_argument("--steps", type=int, default=8, help="steps of each way in a round")
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    mesh = tulle.init(data=-1)
    workload = WORKLOADS[options.workload]
    if options.memory:
        result = memory(workload, options.memory, mesh)
    else:
        result = paired(workload, options.pair, mesh, options.rounds, options.steps)
    if mesh.rank == 0:
        options.output.write_text(json.dumps(result, indent=2) + "\n")


def trainer(workload: Workload, way: str, mesh: tulle.Mesh) -> Callable[[], None]:
    """A function that trains one step in the given way."""
    torch.manual_seed(0)
    model = workload.model().to(mesh.device)
    optimizer = SGD(model.parameters(), lr=1e-3)
    if way == "tulle":
        model, optimizer = tulle.distribute(model, optimizer, mesh)
    elif way in ("ddp", "ddp-hook"):
        model = nn.parallel.DistributedDataParallel(model)
        if way == "ddp-hook":
            model.register_comm_hook(None, tulle.sync.ddp_hook)
    generator = torch.Generator().manual_seed(mesh.rank)
    batches = itertools.cycle([workload.batch(generator).to(mesh.device) for _ in range(16)])

    def step() -> None:
        model(next(batches)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def paired(workload: Workload, ways: tuple[str, str], mesh: tulle.Mesh, rounds: int, steps: int) -> dict[str, object]:
    """Time the two ways in turn, A B, B A, A B ..., and divide pair by pair: what drifts with the machine cancels."""
    step_of = {way: trainer(workload, way, mesh) for way in ways}
    for step in step_of.values():
        for _ in range(_WARM_STEPS):
            step()
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(rounds):
        for way in ways if number % 2 else reversed(ways):
            _wait_for_all(mesh)
            begin_s = time.perf_counter()
            for _ in range(steps):
                step_of[way]()
            _wait_for_all(mesh)
            seconds[way].append((time.perf_counter() - begin_s) / steps)
    first, second = (seconds[way] for way in ways)
    ratios = [one / other for one, other in zip(first, second, strict=True)]
    low, _, high = quantiles(ratios, n=4)
    return {
        "ways": list(ways),
        "ranks": mesh.size,
        "device": torch.cuda.get_device_name() if mesh.device.type == "cuda" else "cpu",
        "rounds": rounds,
        "steps_a_round": steps,
        "median_step_s": {way: median(times) for way, times in seconds.items()},
        "ratio": {"median": median(ratios), "lower_quartile": low, "upper_quartile": high},
        "ratios": ratios,
    }


def _wait_for_all(mesh: tulle.Mesh) -> None:
    if mesh.device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()


def memory(workload: Workload, way: str, mesh: tulle.Mesh) -> dict[str, object]:
    """Peak resident memory over a few steps, the mean over ranks, and what one rank sent in a step."""
    step = trainer(workload, way, mesh)
    for _ in range(5):
        step()
    before = traffic.total.bytes_sent, traffic.total.messages
    step()
    sent = torch.tensor([traffic.total.bytes_sent - before[0], traffic.total.messages - before[1]])
    peak = torch.tensor(float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024))
    dist.all_reduce(peak)
    dist.all_reduce(sent, dist.ReduceOp.MAX)
    return {
        "way": way,
        "ranks": mesh.size,
        "peak_memory_bytes": peak.item() / mesh.size,
        "bytes_sent_per_step": int(sent[0]) if way == "tulle" else None,
        "messages_per_step": int(sent[1]) if way == "tulle" else None,
    }


if __name__ == "__main__":
    main()
