"""`another`: a cluster that nobody has to have, made of what was measured on one, and of what is said of the other."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from tulle.cost import Network
from tulle.errors import PlanError
from tulle.workload import Cluster

MOST_RANKS = 1_000_000
"""Of a cluster that is simulated or planned for: times and rows are kept of each of them."""


@dataclass(frozen=True, slots=True)
class Change:
    """What is different on the other cluster; None is as measured.

    Args:
        hosts: Number of hosts.
        processes_per_host: Ranks of each.
        bandwidth_bytes_per_s: Of a host's link, in each direction.
        latency_s: Of one message between hosts.
        inside_bandwidth_bytes_per_s: Payload that a rank sends to others of its host per second.

    Raises:
        PlanError: If a number is not positive.
    """

    hosts: int | None = None
    processes_per_host: int | None = None
    bandwidth_bytes_per_s: float | None = None
    latency_s: float | None = None
    inside_bandwidth_bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise PlanError(f"a cluster with {name} = {value}: a positive number is needed")


def another(cluster: Cluster, change: Change) -> Cluster:
    """A cluster like one that was measured, but for some changes.

    What ranks do by themselves stays as measured: rows that they add up, copy and sort. A latency that is given is that
    of one message, as makers of networks tell it; it is taken to be paid once a round, and the rounds of an exchange or
    an all-reduce to grow with the logarithm of the number of ranks, as those of MPI and NCCL do (Thakur, Rabenseifner
    and Gropp, *Optimization of Collective Communication Operations in MPICH*, 2005). Measured latencies grow as those
    of gloo do, with the number of hosts (`Cluster.network`).

    Raises:
        PlanError: If it has more than `MOST_RANKS` ranks.

    Example:
        >>> from tulle.cost import Network
        >>> from tulle.workload import Machine
        >>> measured = Cluster(2, 1, Machine(1e12, 1e11), across=Network(5e-4, 1.2e8, sum_bytes_per_s=5e9))
        >>> change = Change(hosts=300, processes_per_host=4, bandwidth_bytes_per_s=12.5e9, latency_s=2e-6)
        >>> larger = another(measured, change)
        >>> larger.ranks, larger.across.sum_bytes_per_s, round(larger.across.latency_s * 1e6)
        (1200, 5000000000.0, 22)
    """
    hosts = change.hosts or cluster.hosts
    processes_per_host = change.processes_per_host or cluster.processes_per_host
    if hosts * processes_per_host > MOST_RANKS:
        raise PlanError(
            f"{hosts:,} hosts x {processes_per_host:,} processes are {hosts * processes_per_host:,} ranks, of which "
            f"{MOST_RANKS:,} at most are computed: ask for fewer hosts or processes a host"
        )
    across, inside, probed = cluster.across, cluster.inside or cluster.across, cluster.probed_ranks
    if change.bandwidth_bytes_per_s is not None:
        across = _at_rate(across, change.bandwidth_bytes_per_s)
    if change.latency_s is not None:
        rounds = math.ceil(math.log2(max(2, hosts * processes_per_host)))
        across = replace(
            across,
            latency_s=rounds * change.latency_s,
            pair_latency_s=change.latency_s,
            all_reduce_latency_s=2 * rounds * change.latency_s,
        )
        probed = None
    if change.inside_bandwidth_bytes_per_s is not None:
        inside = _at_rate(inside, change.inside_bandwidth_bytes_per_s)
    elif cluster.inside is None:
        inside = across
    return Cluster(hosts, processes_per_host, cluster.machine, across, inside, probed, cluster.reduces_inside)


def _at_rate(network: Network, bytes_per_s: float) -> Network:
    return replace(network, bandwidth_bytes_per_s=bytes_per_s, all_reduce_bytes_per_s=None, gather_bytes_per_s=None)
