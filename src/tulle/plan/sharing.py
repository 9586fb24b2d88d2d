"""Among which ranks of axis `data` a plan shares parameters out, and what it costs to gather and to sum them.

over all ranks       gather among all          reduce-scatter among all
over those of hosts  gather within each host   reduce-scatter within each host, then all-reduce of parts between hosts
"""

from __future__ import annotations

from tulle.cost import Cost, Network, all_gather_cost, all_reduce_cost
from tulle.memory import Memory
from tulle.memory.options import HOST


def sharers(memory: Memory, network: Network, ranks: int) -> int:
    """Ranks among which parameters and state, or state alone, are shared out; 1 if they are not.

    Args:
        memory: Says what is.
        network: Of axis `data`; an axis that lies on one host has no `local_ranks`.
        ranks: Of the axis.
    """
    if memory.full_shard == HOST and network.local_ranks > 1:
        return network.local_ranks
    return ranks if memory.full_shard or memory.shard_optimizer else 1


def gather_cost(size_bytes: int, memory: Memory, network: Network, ranks: int) -> Cost:
    """To gather what is shared out, of so many bytes in whole: on one link as long as half of a ring's all-reduce.

    Each rank sends its part to each other, or, where ranks of a host share memory, to each other host. Of what those of
    one host send most leaves it; of a ring one edge does.
    """
    among = sharers(memory, network, ranks)
    if among == ranks and network.local_ranks > 1:
        return all_gather_cost([size_bytes // ranks] * ranks, network)
    within = network if among == ranks else network.inside or network
    return half(all_reduce_cost(size_bytes, within, among))


def scatter_cost(size_bytes: int, memory: Memory, network: Network, ranks: int) -> Cost:
    """To sum gradients to those who keep the parts, and over all who keep the same part."""
    cost, among = gather_cost(size_bytes, memory, network, ranks), sharers(memory, network, ranks)
    if among == ranks:
        return cost
    return cost + all_reduce_cost(size_bytes // among, network.across or network, ranks // among)


def half(cost: Cost) -> Cost:
    """A gather, or a reduce-scatter: one of the two phases of a ring all-reduce."""
    return Cost(cost.bytes // 2, cost.messages // 2, cost.seconds / 2)
