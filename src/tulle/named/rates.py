"""`Rates`: what ranks and the network between them give, assumed or measured; with them costs become seconds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from statistics import median

import torch
from torch import Tensor

from tulle.comm import all_reduce, all_to_all_parts, barrier, gather_values, probe
from tulle.comm.traffic import now_s
from tulle.cost import Network
from tulle.mesh import Axis, Mesh
from tulle.named.gradients import BUCKET_BYTES
from tulle.named.wire import joint

FREE = Network(0.0, float("inf"))
"""A network that costs nothing."""
Product = tuple[int, int, int]
"""Rows, inner entries and columns of two matrices."""
TYPICAL: Product = (512, 512, 512)
_TRIALS = 15
_TRIAL_FLOPS = 500_000_000
_WRITTEN = 4 * 1024 * 1024
"""Numbers that an operation fills, more than a cache holds."""
_BUCKETS = 3
"""So many buckets are summed to learn how fast that goes."""
_BETWEEN_FLOPS = 100_000_000
"""Work between two exchanges: some milliseconds on a core."""
_CALL_FLOPS = 250_000
"""What a core multiplies while three products are called."""
_SMALL_BYTES, _LARGE_BYTES = 4096, 4 * 1024 * 1024
_TRIALS_BETWEEN = 9
_IN_A_ROW = 4
"""Exchanges in a trial, with work between them."""


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
        return together or min((self.network[axis] for axis in sorted(axes)), key=lambda one: one.bandwidth_bytes_per_s)


ASSUMED = Rates(1e14, 1e12, Network(latency_s=1e-5, bandwidth_bytes_per_s=1e11))
"""Rates of an accelerator and its interconnect, where nothing is measured or said."""


def measured(mesh: Mesh, product: Product = TYPICAL) -> Rates:
    """What the ranks of a mesh and its networks give: one answer on all ranks. Every rank must call it.

    Takes a few seconds at 1 Gbit/s: buckets of gradients are summed, because these are what makes a step long.

    Args:
        mesh: The mesh.
        product: Rows, inner entries and columns of the products that matter.
    """
    names = sorted(axis.name for axis in mesh.axes if axis.size > 1)
    several = [some for count in range(1, len(names) + 1) for some in combinations(names, count)]
    networks: dict[str, Network] = {}
    spells = [speeds(mesh, product)]  # in between, as the speed of a machine that others use too drifts
    for some in several:
        networks["+".join(some)] = _between_work(joint(mesh, some), product)
        spells.append(speeds(mesh, product))
    for axis in mesh.axes:  # lines of one axis are measured apart: the first rank's
        networks = gather_values(networks, axis, label="rates")[0]
    flops_per_s, written_bytes_per_s = (median(values) for values in zip(*spells, strict=True))
    return Rates(flops_per_s, written_bytes_per_s, networks)


def speeds(mesh: Mesh, product: Product = TYPICAL) -> tuple[float, float]:
    """Flops of products and bytes written, each per second, of one rank while all are busy. Every rank must call it.

    Products and writes are timed in turn, and a trial lasts until the slowest rank is done, as a step does. A product
    comes with the two that undo it, as in training.
    """
    multiply, flops = _multiplication(product, mesh.device)
    tensor = torch.ones(_WRITTEN, device=mesh.device)
    repeats = _repeats(_TRIAL_FLOPS, flops)
    trials: list[list[float]] = []
    for _ in range(_TRIALS):
        for axis in mesh.axes:
            barrier(axis)  # all ranks shall be busy at once
        trials.append([_seconds(multiply, mesh.device, repeats), _seconds(lambda: tensor * tensor, mesh.device)])
    slowest = torch.tensor(trials, dtype=torch.float64, device=mesh.device)
    for axis in mesh.axes:
        slowest = all_reduce(slowest, axis, op="max", label="rates").wait()
    product_s, write_s = slowest.median(0).values.tolist()
    return flops * repeats / product_s, tensor.nbytes / write_s


def _repeats(work_flops: int, flops: int) -> int:
    """How many products are so much work; fewer of small ones, which take what a call takes, whatever their flops."""
    return max(1, work_flops // max(flops, _CALL_FLOPS))


def _multiplication(product: Product, device: torch.device) -> tuple[Callable[[], None], int]:
    """A product with the two that undo it, and its flops."""
    rows, inner, columns = product
    left, right = torch.ones(rows, inner, device=device), torch.ones(inner, columns, device=device)

    def multiply() -> None:
        made = left @ right
        _ = left.T @ made, made @ right.T

    return multiply, 6 * rows * inner * columns


def _between_work(axis: Axis, product: Product) -> Network:
    """The axis' network as a step meets it, rather than ranks that do nothing else.

    Ranks that have worked come to an exchange one after the other, and where they have as many threads as cores those
    of the network find none free: what an exchange adds to work is several times what it takes by itself. An all-reduce
    is no faster than whole buckets get through, which do not fit into buffers on the way.
    """
    network, bucket_rate = probe(axis), _bucket_rate(axis)
    multiply, flops = _multiplication(product, axis.device)
    repeats = _repeats(_BETWEEN_FLOPS, flops)
    small, large = (torch.zeros(size, dtype=torch.uint8, device=axis.device) for size in (_SMALL_BYTES, _LARGE_BYTES))
    parts = list(small.tensor_split(axis.size))
    lengths = [len(parts[axis.rank])] * axis.size

    def work() -> None:
        for _ in range(repeats):
            multiply()

    def work_and_sum(tensor: Tensor) -> None:
        work()
        all_reduce(tensor, axis, label="rates").wait()

    def work_and_exchange() -> None:
        work()
        all_to_all_parts(parts, lengths, axis, label="rates").wait()

    ways = work, partial(work_and_sum, small), partial(work_and_sum, large), work_and_exchange
    trials: list[list[float]] = []
    for _ in range(_TRIALS_BETWEEN):
        trials.append([])
        for way in ways:
            barrier(axis)
            trials[-1].append(_seconds(way, axis.device, _IN_A_ROW) / _IN_A_ROW)
    slowest = all_reduce(torch.tensor(trials, dtype=torch.float64, device=axis.device), axis, op="max", label="rates")
    work_s, small_s, large_s, exchanged_s = slowest.wait().median(0).values.tolist()
    return replace(
        network,
        latency_s=max(network.latency_s, exchanged_s - work_s),
        all_reduce_latency_s=max(network.all_reduce_latency_s or 0.0, small_s - work_s),
        all_reduce_bytes_per_s=min(bucket_rate, _sent_bytes(_LARGE_BYTES, axis) / max(large_s - small_s, 1e-9)),
    )


def _bucket_rate(axis: Axis) -> float:
    """Bytes per second that a rank sends while a bucket of gradients is summed."""
    bucket = torch.zeros(BUCKET_BYTES, dtype=torch.uint8, device=axis.device)
    times: list[float] = []
    for _ in range(_BUCKETS):
        barrier(axis)
        times.append(_seconds(lambda: all_reduce(bucket, axis, label="rates").wait(), axis.device))
    return _sent_bytes(BUCKET_BYTES, axis) / median(times)


def _sent_bytes(tensor_bytes: int, axis: Axis) -> float:
    """What each rank sends in a ring all-reduce of so many bytes."""
    return 2 * (axis.size - 1) / axis.size * tensor_bytes


def _seconds(work: Callable[[], object], device: torch.device, repeats: int = 1) -> float:
    begin_s = now_s()
    for _ in range(repeats):
        work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return now_s() - begin_s
