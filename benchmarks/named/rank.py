"""One rank of a measurement; `python benchmarks/named` starts them. Prints one line of JSON on rank 0."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist
import twolayer
from layouts import layouts
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor
from wide import wide

import tulle
from tulle import named as tn


def main() -> None:
    """Measure what the first argument names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["operations", "model", "layouts", "wide"])
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    torch.set_num_threads(1)
    result = {"operations": operations, "model": models, "layouts": layouts, "wide": wide}[options.what](options.rounds)
    if int(os.environ.get("RANK", "0")) == 0:
        print(json.dumps(result), flush=True)


def operations(rounds: int) -> list[dict[str, object]]:
    """Microseconds of a processor that an operation takes forward, plain, named and DTensor in turn, on one process."""
    tulle.init(data=1)
    device_mesh = init_device_mesh("cpu", (1,))
    rows: list[dict[str, object]] = []
    for size in (16, 64, 256, 512, 1024):
        b, d, f = tn.dims(b=size, d=size, f=size)
        x, w, bias = torch.randn(size, size), torch.randn(size, size), torch.randn(size)
        named = [tn.from_torch(t, dims) for t, dims in ((x, (b, d)), (w, (d, f)), (bias, d))]
        placed = [distribute_tensor(t, device_mesh, [Replicate()]) for t in (x, w, bias)]
        ways: dict[str, dict[str, Callable[[], object]]] = {
            "add": {
                "plain": lambda x=x: x + x,
                "named": lambda n=named: n[0] + n[0],
                "dtensor": lambda p=placed: p[0] + p[0],
            },
            "add bias": {
                "plain": lambda x=x, c=bias: x + c,
                "named": lambda n=named: n[0] + n[2],
                "dtensor": lambda p=placed: p[0] + p[2],
            },
            "scale": {
                "plain": lambda x=x: x * 2,
                "named": lambda n=named: n[0] * 2,
                "dtensor": lambda p=placed: p[0] * 2,
            },
            "product": {
                "plain": lambda x=x, w=w: torch.einsum("bd,df->bf", x, w),
                "named": lambda n=named, d=d: n[0].dot(n[1], d),
                "dtensor": lambda p=placed: torch.einsum("bd,df->bf", p[0], p[1]),
            },
            "softmax": {
                "plain": lambda x=x: torch.softmax(x, 1),
                "named": lambda n=named, d=d: tn.softmax(n[0], d),
                "dtensor": lambda p=placed: torch.softmax(p[0], 1),
            },
            "sum": {
                "plain": lambda x=x: x.sum(1),
                "named": lambda n=named, d=d: tn.sum(n[0], d),
                "dtensor": lambda p=placed: p[0].sum(1),
            },
        }
        for name, calls in ways.items():
            times = in_turn(calls, 10 * rounds)
            row = {way: 1e6 * median(several) for way, several in times.items()}
            ratios = {
                f"over {way}": median(b / a for a, b in zip(times[way], times["named"], strict=True))
                for way in ("plain", "dtensor")
            }
            rows.append({"operation": name, "megabytes": x.nbytes / 2**20, **row, **ratios})
    return rows


def in_turn(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of a call of each way, round by round, for some milliseconds each: what disturbs one does all.

    The processor's time counts, which others do not take; and each way goes first as often as the others.
    """
    once = time.perf_counter()
    for call in calls.values():
        call()
    once = time.perf_counter() - once
    repeats = max(1, min(100, int(0.005 / max(once, 1e-6))))
    times: dict[str, list[float]] = {way: [] for way in calls}
    ways = list(calls)
    for _ in range(rounds):
        for way in ways:
            begin = time.thread_time()
            for _ in range(repeats):
                calls[way]()
            times[way].append((time.thread_time() - begin) / repeats)
        ways.append(ways.pop(0))
    return times


def models(rounds: int) -> list[dict[str, object]]:
    """Seconds of a step of the two-layer model on four ranks, named and DTensor in turn, for three layouts."""
    rows: list[dict[str, object]] = []
    for name, (sizes, layout) in twolayer.LAYOUTS.items():
        mesh = tulle.init(timeout=None, backend=None, **sizes)
        named, values = twolayer.named_step(mesh, layout)
        device_mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        dtensor = twolayer.annotated_step(device_mesh, name, values)
        losses = named(), dtensor()
        assert abs(losses[0] - losses[1]) < 1e-4, losses
        times: dict[str, list[float]] = {"named": [], "dtensor": []}
        for _ in range(rounds):
            for way, step in (("named", named), ("dtensor", dtensor)):
                dist.barrier()
                begin = time.perf_counter()
                for _ in range(4):
                    step()
                times[way].append((time.perf_counter() - begin) / 4)
        ratios = [b / a for a, b in zip(times["named"], times["dtensor"], strict=True)]
        row = {way: 1e3 * median(several) for way, several in times.items()}
        rows.append({"layout": name, **row, "ratio": median(ratios), "least": min(ratios), "most": max(ratios)})
    return rows


if __name__ == "__main__":
    main()
