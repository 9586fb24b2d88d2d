"""1F1B of two ranks that share one GPU, beside torch's over the same stages, in turns; gradients are compared first.

    nvidia-cuda-mps-control -d    # else the ranks have the GPU one at a time
    torchrun --standalone --nproc-per-node 2 benchmarks/pipeline/one_gpu.py --width 2048 --length 512 --out one.json

nccl refuses two ranks of a host on one GPU: each says that it is on a host of its own, so that nccl goes by sockets.
`TULLE_PIPELINE_NCCL=0` has tulle's tensors go through the hosts instead. Without a GPU it runs on the CPU, over gloo.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from speed import of_torch, of_tulle
from torch import nn
from torch.distributed.pipelining import Schedule1F1B

import tulle
from tulle.pipeline.mailbox import mailbox_of

WARM_STEPS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--samples", type=int, default=4, help="of a micro-batch")
    parser.add_argument("--length", type=int, default=256, help="of a sequence")
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--out", type=Path)
    parser.set_defaults(model="gpt2")
    options = parser.parse_args()
    if torch.cuda.is_available():
        own = f"rank {os.environ['RANK']}"
        os.environ |= {"NCCL_HOSTID": own, "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "LOCAL_RANK": "0"}
        torch.cuda.set_device(0)
        torch.backends.cuda.matmul.allow_tf32 = True
        dist.init_process_group("nccl", device_id=torch.device("cuda", 0))
    mesh = tulle.init(pipe=-1)
    shape = (options.samples * options.micro_batches, options.length, options.width)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(mesh.device)
    model, ours = of_tulle(options, mesh, x, "1f1b", [])
    stage, theirs = of_torch(options, mesh, x, Schedule1F1B)
    difference = compare(model, ours, stage, theirs, mesh)
    times = take_turns({"tulle": ours, "torch": theirs}, [*model.parameters(), *stage.parameters()], options.steps)
    ratios = [a / b for a, b in zip(times["tulle"], times["torch"], strict=True)]
    result = {
        **{name: value for name, value in vars(options).items() if name != "out"},
        "torch_version": torch.__version__,
        "device": torch.cuda.get_device_name() if mesh.device.type == "cuda" else "cpu",
        "channels": sorted({type(channel).__name__ for channel in mailbox_of(mesh["pipe"])._channels.values()}),
        "worst_relative_difference_of_gradients": difference,
        "median_ms": {way: round(1e3 * statistics.median(taken), 2) for way, taken in times.items()},
        "median_ratio": round(statistics.median(ratios), 3),
        "ratios": sorted(round(ratio, 3) for ratio in ratios),
    }
    if mesh.rank == 0:
        print(json.dumps(result))
        if options.out:
            options.out.write_text(json.dumps(result, indent=1))
    dist.destroy_process_group()


def compare(
    model: nn.Module, ours: Callable[[], object], stage: nn.Module, theirs: Callable[[], object], mesh: tulle.Mesh
) -> float:
    """The largest difference of a gradient of this rank's layers, relative to its largest number."""
    ours()
    theirs()
    first = mesh.rank * len([*stage.children()])
    placed, worst = dict(model.named_parameters()), 0.0
    for name, parameter in stage.named_parameters():
        number, _, rest = name.partition(".")
        mine, expected = placed[f"layers.{int(number) + first}.{rest}"].grad, parameter.grad
        assert mine is not None, name
        assert expected is not None, name
        worst = max(worst, ((mine - expected).abs().max() / expected.abs().max()).item())
    return worst


def take_turns(
    ways: dict[str, Callable[[], object]], parameters: list[nn.Parameter], steps: int
) -> dict[str, list[float]]:
    """Seconds of steps, one way's after the other's, until the GPU is done on all ranks."""
    times: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(WARM_STEPS + steps):
        for way, step in ways.items():
            for parameter in parameters:
                parameter.grad = None
            meet()
            begin_s = time.perf_counter()
            step()
            meet()
            times[way].append(time.perf_counter() - begin_s)
    return {way: taken[WARM_STEPS:] for way, taken in times.items()}


def meet() -> None:
    """Wait for all ranks, and their GPU."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    dist.barrier()
    if torch.cuda.is_available():
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
