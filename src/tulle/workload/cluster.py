"""`Cluster`: what a training step would run on, as plain values, and from and to JSON."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from tulle.cost import Network
from tulle.entries import Entries


@dataclass(frozen=True, slots=True)
class Machine:
    """What one process computes with.

    Args:
        flop_per_s: Floating-point operations of a large matrix product, per second, while all processes compute.
        memory_bytes_per_s: Bytes copied per second, read and written counted once, while all processes do so.
        memory_bytes: Memory that one process may use; None is no limit.
        slowdown: Factor by which computation takes longer while the process communicates; 1 is full overlap.
        link_slowdown: Factor by which an exchange takes longer while the processes compute.
        call_s: Seconds that the run-time of a pipeline takes for each placed module and micro-batch, there and back, on
            every rank: all run the program. What lookups in tables take besides their rows is counted in it too.
        operation_s: The same for an operation between modules, on what these have made.
        micro_batch_s: The same for a micro-batch, whatever runs in it. These defaults are those of GPT-2 on a CPU.
        crowding: What computation takes while 1, 2, .. of the processes that share processors and memory compute, by
            what it takes while all do; they have consecutive ranks. Empty for processes that share nothing.
    """

    flop_per_s: float
    memory_bytes_per_s: float
    memory_bytes: int | None = None
    slowdown: float = 1.0
    link_slowdown: float = 1.0
    call_s: float = 0.2e-3
    operation_s: float = 0.15e-3
    micro_batch_s: float = 1e-3
    crowding: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Cluster:
    """Hosts that are alike, with processes that are alike; ranks are numbered host by host.

    Args:
        hosts: Number of hosts.
        processes_per_host: Ranks of each.
        machine: What one process computes with.
        across: The network between hosts for one rank of each, while nobody else of its host uses it.
        inside: The network among ranks of one host; None is that of `across`.
        probed_ranks: Among how many ranks `across` was measured: exchanges of more take longer, of fewer less. None
            for a network whose latencies hold for any number.
        reduces_inside: Whether ranks of a host reduce among themselves, and each sends a share to other hosts
            (`tulle.comm.levels`), instead of in one ring with all; what is gathered goes to each host once then.

    Example:
        >>> cluster = Cluster(2, 4, Machine(1e12, 1e11), across=Network(5e-5, 1.25e9), inside=Network(1e-5, 1e10))
        >>> cluster.ranks, cluster.network(4).bandwidth_bytes_per_s, cluster.network(2, stride=4).bandwidth_bytes_per_s
        (8, 10000000000.0, 312500000.0)
    """

    hosts: int
    processes_per_host: int
    machine: Machine
    across: Network
    inside: Network | None = None
    probed_ranks: int | None = None
    reduces_inside: bool = False

    @property
    def ranks(self) -> int:
        """Of all hosts."""
        return self.hosts * self.processes_per_host

    def network(self, size: int, *, stride: int = 1) -> Network:
        """What an axis of ranks `first + i * stride` gives while all such groups, side by side, use it alike."""
        inside = self.inside or self.across
        span = size * stride
        if span <= self.processes_per_host and (self.hosts == 1 or self.processes_per_host % span == 0):
            return inside
        sharing = min(stride, self.processes_per_host)  # groups that send through one host's link at a time
        local_ranks = max(1, min(self.processes_per_host // stride, size - 1))  # of one group on one host
        hosts = -(-size // local_ranks)
        across = _among(self.across, hosts, self.probed_ranks).faster(1 / sharing)
        if local_ranks == 1:
            return across
        # Of what a rank sends to all others some stays on the host; of a ring one edge leaves it.
        leaving = (size - local_ranks) / (size - 1)
        everyone = across.faster(1 / local_ranks)
        fewer = (1 - 1 / size) / (1 - 1 / hosts) if self.reduces_inside else 1.0
        return replace(
            across,
            bandwidth_bytes_per_s=everyone.bandwidth_bytes_per_s / leaving,
            gather_bytes_per_s=across.bandwidth_bytes_per_s / leaving if self.reduces_inside else None,
            all_reduce_bytes_per_s=fewer * (across.all_reduce_bytes_per_s or across.bandwidth_bytes_per_s),
            local_ranks=local_ranks,
            inside=inside,
            across=everyone,
        )


def cluster_from_json(parsed: object, path: str = "") -> Cluster:
    """From what a profile's JSON holds of its cluster.

    Args:
        parsed: Plain values.
        path: Where they stand.

    Raises:
        PlanError: Naming the entry that is wrong, and where it stands.
    """
    entries = Entries.of(parsed, path, Cluster)
    of_one = partial(entries.whole, least=1)

    def network(name: str) -> Network:
        return network_from_json(entries.get(name, object, "a network"), entries.at(name))

    readers: dict[str, Callable[[str], Any]] = dict.fromkeys(("hosts", "processes_per_host", "probed_ranks"), of_one)
    readers |= {"reduces_inside": entries.flag}
    readers |= {"machine": lambda name: _machine(entries.within(name, Machine)), "across": network, "inside": network}
    return Cluster(**entries.of_fields(Cluster, readers))


def _machine(entries: Entries) -> Machine:
    factor = partial(entries.number, least=1)
    readers = {"flop_per_s": entries.rate, "memory_bytes_per_s": entries.rate}
    readers |= {"memory_bytes": partial(entries.whole, least=1), "slowdown": factor, "link_slowdown": factor}
    readers |= dict.fromkeys(("call_s", "operation_s", "micro_batch_s"), entries.number)
    readers |= {"crowding": partial(_shares, entries)}
    return Machine(**entries.of_fields(Machine, readers))


def _shares(entries: Entries, name: str) -> tuple[float, ...]:
    expected = "a list of numbers above 0, up to 1"
    found = entries.get(name, (list, tuple), expected)
    if not all(isinstance(one, (int, float)) and 0 < one <= 1 for one in found):
        raise entries.wrong(name, expected)
    return tuple(map(float, found))


def network_to_json(network: Network) -> dict[str, Any]:
    """As plain values; what costs nothing is left out, since JSON has no infinity."""
    nested = {"inside": network.inside, "across": network.across}
    values = asdict(network) | {name: network_to_json(part) if part else None for name, part in nested.items()}
    return {name: value for name, value in values.items() if value != float("inf")}


def network_from_json(parsed: object, path: str = "") -> Network:
    """From what `network_to_json` gave; what an older version did not measure costs nothing.

    Args:
        parsed: Plain values.
        path: Where they stand.

    Raises:
        PlanError: Naming the entry that is wrong, and where it stands.
    """
    entries = Entries.of(parsed, path, Network)

    def nested(name: str) -> Network:
        return network_from_json(entries.values[name], entries.at(name))

    of_links = ("bandwidth_bytes_per_s", "all_reduce_bytes_per_s", "gather_bytes_per_s")
    rates = (*of_links, "sum_bytes_per_s", "copy_bytes_per_s")
    times = ("latency_s", "all_reduce_latency_s", "pair_latency_s", "number_s")
    readers: dict[str, Callable[[str], Any]] = dict.fromkeys(rates, entries.rate)
    readers |= dict.fromkeys(times, entries.number) | dict.fromkeys(("inside", "across"), nested)
    return Network(**entries.of_fields(Network, readers | {"local_ranks": partial(entries.whole, least=1)}))


def _among(network: Network, ranks: int, probed: int | None) -> Network:
    """What a network that was measured among some ranks gives to another number of them.

    An exchange of all with all is one of pairs and something for every further rank; a ring has as many rounds as there
    are further ranks.
    """
    if probed is None or ranks == probed or min(ranks, probed) < 2:
        return network
    pair_s = network.latency_s / (probed - 1) if network.pair_latency_s is None else network.pair_latency_s
    pair_s = min(pair_s, network.latency_s)
    further_s = (network.latency_s - pair_s) / max(1, probed - 2)
    reduce_s = network.all_reduce_latency_s
    return replace(
        network,
        latency_s=pair_s + further_s * (ranks - 2),
        all_reduce_latency_s=None if reduce_s is None else reduce_s * (ranks - 1) / (probed - 1),
    )
