"""`measure_cluster`: what hosts, processes and networks give while all processes work, as a plan's `Cluster`."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import torch

from tulle.allowance import memory_bytes as allowed_bytes
from tulle.comm import can_have_levels, probe
from tulle.cost import Network
from tulle.mesh import Axis
from tulle.profiling.overlap import overlap, slowest_s
from tulle.profiling.steps import Twin
from tulle.workload import Cluster, Machine

NOMINAL = Network(latency_s=5e-5, bandwidth_bytes_per_s=1.25e9)
"""Of a cluster that nobody has measured: 10 Gbit/s."""
_LABEL = "network probe"
_SIDE = 512
_COPIED_BYTES = 32 * 1024 * 1024
_REPEATS = 5


def measure_cluster(axis: Axis, twin: Twin | None = None) -> Cluster:
    """Measure the machine and, on an axis of all ranks, the network. Every rank of the axis must call it.

    An axis of one rank gives a nominal network, to be replaced by that of the cluster that is planned for.

    Args:
        axis: All of whose ranks work at once.
        twin: Whose backward computes beside exchanges; None for matrix products.
    """
    machine = _machine(axis)
    if axis.size == 1:
        return Cluster(1, 1, machine, across=NOMINAL)
    found = probe(axis)
    slowdown, link_slowdown = overlap(axis, found, twin)
    machine = replace(machine, slowdown=slowdown, link_slowdown=link_slowdown)
    hosts = axis.hosts or axis.ranks
    of_hosts = {*Counter(hosts).values()}
    local = of_hosts.pop() if len(of_hosts) == 1 else 1  # where hosts are unlike, each rank is taken for one
    count = axis.size // local
    reduces_inside = can_have_levels(axis)
    if local == 1:
        return Cluster(count, 1, machine, _bare(found), probed_ranks=count, reduces_inside=reduces_inside)
    if count == 1 or found.across is None or found.inside is None:
        return Cluster(count, local, machine, _bare(found), _bare(found) if count == 1 else None, None, reduces_inside)
    # It was measured while all ranks of a host sent through its link; one alone has it to itself.
    return Cluster(count, local, machine, found.across.faster(local), found.inside, count, reduces_inside)


def _bare(network: Network) -> Network:
    return replace(network, local_ranks=1, inside=None, across=None)


def _machine(axis: Axis) -> Machine:
    left = torch.randn(_SIDE, _SIDE, device=axis.device)
    source = torch.ones(_COPIED_BYTES // 4, device=axis.device)
    target = torch.empty_like(source)
    product_s, _ = slowest_s(lambda: lambda: left @ left, axis, _REPEATS)
    copy_s, _ = slowest_s(lambda: lambda: target.copy_(source), axis, _REPEATS)
    return Machine(2 * _SIDE**3 / product_s, _COPIED_BYTES / copy_s, memory_bytes(axis))


def memory_bytes(axis: Axis) -> int:
    """Of the device, or this process's share of its host's."""
    if axis.device.type == "cuda":
        return torch.cuda.get_device_properties(axis.device).total_memory
    hosts = axis.hosts or axis.ranks
    return allowed_bytes() // hosts.count(hosts[axis.rank])
