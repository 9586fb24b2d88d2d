"""`Rates`: what ranks and the network between them give, assumed or measured; with them costs become seconds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import combinations
from statistics import median

import torch

from tulle.comm import all_reduce, barrier, gather_values, probe
from tulle.comm.traffic import now_s
from tulle.cost import Network
from tulle.mesh import Axis, Mesh
from tulle.named.gradients import BUCKET_BYTES
from tulle.named.wire import joint

FREE = Network(0.0, float("inf"))
"""A network that costs nothing."""
_TRIALS = 15
_MATRIX = 512
_WRITTEN = 4 * 1024 * 1024
"""Numbers that an operation fills, more than a cache holds."""
_BUCKETS = 3
"""So many buckets are summed to learn how fast that goes."""


@dataclass(frozen=True, slots=True)
class Rates:
    """What ranks and the network between them give; what is not known costs nothing.

    Args:
        flops_per_s: Of products, on one rank while all are busy.
        written_bytes_per_s: Memory that elementwise operations fill, on one rank while all are busy.
        network: Of each axis, by name, or of several together as `"data+model"`, the names sorted; or one for all.
    """

    flops_per_s: float = float("inf")
    written_bytes_per_s: float = float("inf")
    network: Network | Mapping[str, Network] = FREE

    def of(self, axes: tuple[str, ...]) -> Network:
        """The network of some axes together: as measured, else the slowest of theirs."""
        if isinstance(self.network, Network):
            return self.network
        together = self.network.get("+".join(sorted(axes)))
        return together or min((self.network[axis] for axis in axes), key=lambda one: one.bandwidth_bytes_per_s)


ASSUMED = Rates(1e14, 1e12, Network(latency_s=1e-5, bandwidth_bytes_per_s=1e11))
"""Rates of an accelerator and its interconnect, where nothing is measured or said."""


def measured(mesh: Mesh) -> Rates:
    """What the ranks of a mesh and its networks give: one answer on all ranks. Every rank must call it.

    Takes a few seconds at 1 Gbit/s: buckets of gradients are summed, because these are what makes a step long.
    """
    names = sorted(axis.name for axis in mesh.axes if axis.size > 1)
    several = [some for count in range(1, len(names) + 1) for some in combinations(names, count)]
    networks = {"+".join(some): _with_buckets(joint(mesh, some)) for some in several}
    for axis in mesh.axes:
        barrier(axis)  # all ranks shall be busy at once
    speeds = _flops_per_s(mesh.device), _written_bytes_per_s(mesh.device)
    # Lines of one axis are measured apart, and speeds by each rank: networks are the first rank's, speeds the slowest.
    for axis in mesh.axes:
        heard = gather_values((networks, speeds), axis, label="rates")
        networks = heard[0][0]
        speeds = min(flops for _, (flops, _) in heard), min(written for _, (_, written) in heard)
    return Rates(*speeds, networks)


def _with_buckets(axis: Axis) -> Network:
    """The axis' network, its all-reduce as fast as whole buckets get through: slower than what fits into buffers."""
    network = probe(axis)
    bucket = torch.zeros(BUCKET_BYTES, dtype=torch.uint8, device=axis.device)

    def summed() -> None:
        barrier(axis)
        all_reduce(bucket, axis, label="rates").wait()

    sent_bytes = 2 * (axis.size - 1) / axis.size * BUCKET_BYTES
    return replace(network, all_reduce_bytes_per_s=sent_bytes / _typical_s(summed, axis.device, _BUCKETS))


def _flops_per_s(device: torch.device) -> float:
    matrix = torch.ones(_MATRIX, _MATRIX, device=device)
    return 2 * _MATRIX**3 / _typical_s(lambda: matrix @ matrix, device)


def _written_bytes_per_s(device: torch.device) -> float:
    tensor = torch.ones(_WRITTEN, device=device)
    return tensor.nbytes / _typical_s(lambda: tensor * tensor, device)


def _typical_s(work: Callable[[], object], device: torch.device, trials: int = _TRIALS) -> float:
    times: list[float] = []
    for _ in range(trials):
        begin_s = now_s()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(now_s() - begin_s)
    return median(times)
