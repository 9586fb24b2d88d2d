"""Measures what an axis' network gives: latency from the smallest exchange, bandwidth from a large one."""

from __future__ import annotations

import torch

from tulle.comm.collectives import all_reduce, barrier
from tulle.comm.parts import all_to_all_parts
from tulle.comm.traffic import now_s
from tulle.cost import Network
from tulle.mesh import Axis

ALONE = Network(latency_s=0.0, bandwidth_bytes_per_s=float("inf"))
"""The network of an axis of one rank: nothing travels."""
_SMALL_REPEATS = 20
_LARGE_REPEATS = 4
_LARGE_BYTES = 4 * 1024 * 1024


def probe(axis: Axis) -> Network:
    """Measure the network of an axis once; the same numbers on all ranks. Every rank of the axis must call it.

    Takes about as long as sending 16 MB, and is remembered for the axis.
    """
    if axis.size == 1:
        return ALONE
    if not axis.measured:
        axis.measured.append(_measure(axis))
    return axis.measured[0]


def _measure(axis: Axis) -> Network:
    small_s = _exchange_s(axis, 8, _SMALL_REPEATS)
    large_s = _exchange_s(axis, _LARGE_BYTES, _LARGE_REPEATS)
    slowest = torch.tensor([small_s, large_s], dtype=torch.float64, device=axis.device)
    small_s, large_s = all_reduce(slowest, axis, label="network probe", op="max").wait().tolist()
    # A rank sends to size - 1 others at once: that is one latency for the small exchange, as it is for a real one.
    return Network(small_s, _LARGE_BYTES / max(large_s - small_s, large_s / 2))


def _exchange_s(axis: Axis, total_bytes: int, repeats: int) -> float:
    """Least seconds in which each rank sends `total_bytes` in all to the others, evenly: what others do adds only."""
    length = max(1, total_bytes // (axis.size - 1))
    parts = [torch.zeros(length, dtype=torch.uint8, device=axis.device) for _ in range(axis.size)]
    times: list[float] = []
    for _ in range(repeats):
        barrier(axis)
        begin_s = now_s()
        all_to_all_parts(parts, [length] * axis.size, axis, label="network probe").wait()
        if axis.device.type == "cuda":
            torch.cuda.synchronize(axis.device)
        times.append(now_s() - begin_s)
    return min(times)
