"""`measure_cluster`: what hosts, processes and networks give while all processes work, as a plan's `Cluster`."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from statistics import median

import torch

from tulle.comm import all_reduce, barrier, gather_values, now_s, probe
from tulle.cost import Network
from tulle.mesh import Axis
from tulle.workload import Cluster, Machine

NOMINAL = Network(latency_s=5e-5, bandwidth_bytes_per_s=1.25e9)
"""Of a cluster that nobody has measured: 10 Gbit/s."""
_LABEL = "network probe"
_SIDE = 512
_COPIED_BYTES = 32 * 1024 * 1024
_REPEATS = 5
_OVERLAP_S = 0.03
_OVERLAP_REPEATS = 15
"""With five of 0.05 s the factor of computation was 1.0 to 2.1 on the same four cores, with these 1.5 to 1.8."""


def measure_cluster(axis: Axis) -> Cluster:
    """Measure the machine and, on an axis of all ranks, the network. Every rank of the axis must call it.

    An axis of one rank gives a nominal network, to be replaced by that of the cluster that is planned for.
    """
    machine = _machine(axis)
    if axis.size == 1:
        return Cluster(1, 1, machine, across=NOMINAL)
    found = probe(axis)
    slowdown, link_slowdown = _overlap(axis, found)
    machine = replace(machine, slowdown=slowdown, link_slowdown=link_slowdown)
    hosts = axis.hosts or axis.ranks
    count = len(set(hosts))
    local = axis.size // count
    if local == 1:
        return Cluster(count, 1, machine, found, probed_ranks=count)
    if count == 1 or found.across is None or found.inside is None:
        return Cluster(count, local, machine, _bare(found), _bare(found) if count == 1 else None)
    # It was measured while all ranks of a host sent through its link; one alone has it to itself.
    across = replace(
        found.across,
        bandwidth_bytes_per_s=found.across.bandwidth_bytes_per_s * local,
        all_reduce_bytes_per_s=found.across.all_reduce_bytes_per_s and found.across.all_reduce_bytes_per_s * local,
    )
    return Cluster(count, local, machine, across, found.inside, probed_ranks=count)


def _bare(network: Network) -> Network:
    return replace(network, local_ranks=1, inside=None, across=None)


def _machine(axis: Axis) -> Machine:
    left = torch.randn(_SIDE, _SIDE, device=axis.device)
    source = torch.ones(_COPIED_BYTES // 4, device=axis.device)
    target = torch.empty_like(source)
    product_s = _slowest(lambda: left @ left, axis)
    copy_s = _slowest(lambda: target.copy_(source), axis)
    return Machine(2 * _SIDE**3 / product_s, _COPIED_BYTES / copy_s, memory_bytes(axis))


def memory_bytes(axis: Axis) -> int:
    """Of the device, or this process's share of its host's."""
    if axis.device.type == "cuda":
        return torch.cuda.get_device_properties(axis.device).total_memory
    hosts = axis.hosts or axis.ranks
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // hosts.count(hosts[axis.rank])


def _slowest(work: Callable[[], object], axis: Axis, repeats: int = _REPEATS) -> float:
    """Median seconds of the slowest rank, all ranks at once."""
    seconds: list[float] = []
    for _ in range(repeats + 1):
        barrier(axis)
        begin_s = now_s()
        work()
        if axis.device.type == "cuda":
            torch.cuda.synchronize(axis.device)
        seconds.append(now_s() - begin_s)
    return max(gather_values(median(seconds[1:]), axis, label=_LABEL))


def _overlap(axis: Axis, network: Network) -> tuple[float, float]:
    """By what factor computation takes longer beside an all-reduce, and an all-reduce beside computation."""
    left = torch.randn(_SIDE, _SIDE, device=axis.device)
    alone_s = _slowest(lambda: left @ left, axis)
    products = max(1, round(_OVERLAP_S / alone_s))
    rate = network.all_reduce_bytes_per_s or network.bandwidth_bytes_per_s
    tensor = torch.zeros(max(1024, round(_OVERLAP_S * rate / 8)), device=axis.device)

    def compute() -> None:
        for _ in range(products):
            _ = left @ left

    def communicate() -> None:
        all_reduce(tensor, axis, label=_LABEL).wait()

    compute_s, communicate_s = (_slowest(work, axis, _OVERLAP_REPEATS) for work in (compute, communicate))
    beside_s: list[float] = []
    whole_s: list[float] = []
    for _ in range(_OVERLAP_REPEATS):
        barrier(axis)
        begin_s = now_s()
        under_way = all_reduce(tensor, axis, label=_LABEL)
        compute()
        beside_s.append(now_s() - begin_s)
        under_way.wait()
        whole_s.append(now_s() - begin_s)
    heard = gather_values((median(beside_s), median(whole_s)), axis, label=_LABEL)
    computing_s, communicating_s = (max(times) for times in zip(*heard, strict=True))
    return max(1.0, computing_s / compute_s), max(1.0, communicating_s / max(communicate_s, computing_s))
