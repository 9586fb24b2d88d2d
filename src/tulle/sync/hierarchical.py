"""Scheme `hierarchical`: one scheme among the ranks of each host, another between hosts.

    hosts 2, ranks 4      1 inside            2 across            3 inside
    rank 0 of host A      sum of host A       its half, with 2    both halves
    rank 1 of host A      sum of host A       its half, with 3    both halves
    rank 2 of host B      sum of host B       its half, with 0    both halves
    rank 3 of host B      sum of host B       its half, with 1    both halves

After step 1 the ranks of a host hold the same rows, so each takes its share of them between the hosts. Shares are dealt
by a hash, alike on all hosts, that is not the one by which owners across are dealt rows: with one hash for both, owners
would get nothing, or several times their part. Rows that several ranks of a host hold leave it once.

Zen reduces inside a machine before its sparse scheme goes across (OSDI'25, section 4); which two schemes are best here
is a matter of cost, and the two choices do not depend on each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tulle.comm import Deferred, all_gather_parts, hosts_of
from tulle.cost import Characteristics, Cost, Network, exchange_cost, work_cost
from tulle.errors import PlanError
from tulle.mesh import Axis
from tulle.partition import share
from tulle.presence import Presence
from tulle.sync.numbers import gather_numbers, numbers_bytes, tell_count
from tulle.sync.protocol import Route, Scheme
from tulle.sync.table import Table

_SETTLING_BYTES = 8


@dataclass(frozen=True, slots=True, eq=False)
class HierarchicalRoute:
    """The ways inside, across, and back.

    Args:
        table: The table.
        inside: The ranks of this host.
        rows: `[union]` the rows of the sum, ascending.
        within: The way of step 1.
        share: `[share]` which of the host's rows are this rank's share.
        between: The way of step 2.
        lengths: Rows of the sum that each rank of the host has after step 2.
        places: `[union]` where each row lies when these are laid end to end.
    """

    table: Table
    inside: Axis
    rows: Tensor
    within: Route
    share: Tensor
    between: Route
    lengths: Sequence[int]
    places: Tensor

    def all_reduce(self, values: Tensor) -> Deferred[Tensor]:
        """`[rows, width]` of this rank to `[union, width]`, bitwise the same on all ranks. Every rank must call it."""
        table = self.table
        summed = self.within.all_reduce(values)

        def finish() -> Tensor:
            whole = self.between.all_reduce(summed.wait()[self.share]).wait()
            shares = all_gather_parts(table.to_wire(whole), self.lengths, self.inside, label=table.label)
            return table.from_wire(shares.wait().index_select(0, self.places))

        return Deferred(finish)


@dataclass(frozen=True, slots=True)
class Hierarchical:
    """The scheme for a choice of two others.

    Args:
        inside: Among the ranks of a host.
        across: Between hosts.
    """

    inside: Scheme
    across: Scheme

    def route(self, indices: Tensor, table: Table, counts: Sequence[int], axis: Axis) -> Deferred[Route]:
        """Settle the ways; arguments as for `tulle.sync.allgather.route`.

        Raises:
            PlanError: On every rank, if hosts have different numbers of ranks.
        """
        inside, across = hosts_of(axis)
        if inside is None or across is None:
            raise PlanError(
                f"scheme 'hierarchical' needs the same number of ranks on every host, axis {axis.name!r} has hosts "
                f"{list(axis.hosts)}: use another scheme, or start as many ranks on each host"
            )
        if inside.size == 1:
            return self.across.route(indices, table, counts, across)
        if across.size == 1:
            return self.inside.route(indices, table, counts, inside)
        held = [counts[axis.ranks.index(rank)] for rank in inside.ranks]
        within = self.inside.route(indices, table, held, inside)
        return Deferred(lambda: self._beyond(within.wait(), table, inside, across))

    def _beyond(self, within: Route, table: Table, inside: Axis, across: Axis) -> Route:
        places_of_share = (share(within.rows, inside.size) == inside.rank).nonzero().squeeze(1)
        mine = within.rows[places_of_share]
        between = self.across.route(mine, table, tell_count(len(mine), table, across), across).wait()
        lengths = tell_count(len(between.rows), table, inside)
        told = gather_numbers(between.rows, lengths, table.num_rows, table, inside).wait()
        rows, places = torch.sort(torch.cat(told))
        return HierarchicalRoute(table, inside, rows, within, places_of_share, between, lengths, places)

    def cost(self, characteristics: Characteristics, network: Network, ranks: int) -> Cost:
        """Both schemes on what they get, and the return inside; bytes are at most so many.

        A network that was measured without hosts counts each rank as one on a host of its own.
        """
        inside_ranks = network.local_ranks
        if inside_ranks == 1 or network.inside is None or network.across is None:
            return self.across.cost(characteristics, network, ranks)
        if ranks <= inside_ranks:
            return self.inside.cost(characteristics, network.inside, ranks)
        levels = _Levels(characteristics.at(ranks), inside_ranks, ranks)
        between = levels.between(self.across, network.across)
        return levels.within(self.inside, network.inside) + between + _back(levels.shares, network.inside)


def best_pair(
    schemes: Mapping[str, Scheme], characteristics: Characteristics, network: Network, ranks: int
) -> tuple[str, str]:
    """The names of the schemes of least cost inside and across hosts: neither depends on the other.

    Args:
        schemes: Those that take all ranks alike, by name.
        characteristics: What the gradient looks like.
        network: What the axis gives, of more ranks than a host has.
        ranks: Number of ranks.
    """
    inside, across = network.inside, network.across
    if inside is None or across is None:  # nothing is known of hosts, and they take all ranks alike
        return next(iter(schemes)), min(schemes, key=lambda n: schemes[n].cost(characteristics, network, ranks).seconds)
    levels = _Levels(characteristics.at(ranks), network.local_ranks, ranks)
    return (
        min(schemes, key=lambda name: levels.within(schemes[name], inside).seconds),
        min(schemes, key=lambda name: levels.between(schemes[name], across).seconds),
    )


class _Levels:
    """What is exchanged within each host, and what each rank of a host takes across."""

    def __init__(self, looks: Characteristics, inside_ranks: int, ranks: int) -> None:
        self._hosts = -(-ranks // inside_ranks)
        firsts = range(0, ranks, inside_ranks)
        self._of_hosts = [looks.among(range(first, min(ranks, first + inside_ranks))) for first in firsts]
        self.shares = _shares(looks, inside_ranks)

    def within(self, scheme: Scheme, network: Network) -> Cost:
        """What a scheme costs inside the host that is done last."""
        return slowest([scheme.cost(host, network, len(host.rows_per_rank)) for host in self._of_hosts])

    def between(self, scheme: Scheme, network: Network) -> Cost:
        """What a scheme costs between hosts, for the share of rows that is done last."""
        return slowest([scheme.cost(one, network, self._hosts) for one in self.shares])


def slowest(costs: Sequence[Cost]) -> Cost:
    """Of what happens side by side: the time of the slowest, the bytes and messages of who sends most."""
    payer = max(costs, key=lambda cost: cost.bytes)
    return Cost(payer.bytes, payer.messages, max(cost.seconds for cost in costs))


def _shares(looks: Characteristics, inside_ranks: int) -> list[Characteristics]:
    """What each rank of a host takes across: the share of rows that any rank of its host holds."""
    shares: list[Characteristics] = []
    for presence in looks.spread.once(_dealt, inside_ranks):
        counts = tuple(round(count) for count in presence.counts().tolist())
        shares.append(Characteristics(looks.num_rows, looks.width, looks.value_bytes, counts, presence))
    return shares


def _dealt(spread: Presence, inside_ranks: int) -> list[Presence]:
    """Which hosts hold which of the rows that each rank of a host takes across."""
    by_host = torch.stack([part.any(0) for part in spread.held.split(inside_ranks)])
    taken_by = share(spread.rows, inside_ranks)
    taken = [taken_by == rank for rank in range(inside_ranks)]
    return [replace(spread, rows=spread.rows[mine], held=by_host[:, mine]) for mine in taken]


def _back(shares: Sequence[Characteristics], network: Network) -> Cost:
    """Step 3: the shares of the sum, and their numbers, to all ranks of the host."""
    others = len(shares) - 1
    looks = shares[0]
    sizes = [
        one.union_rows * looks.values_bytes + numbers_bytes(one.union_rows, looks.num_rows, looks.index_bytes)
        for one in shares
    ]
    told_bytes = 2 * _SETTLING_BYTES * others
    received_bytes = sum(sizes) - min(sizes)
    exchange = exchange_cost(
        others * max(sizes) + told_bytes, 4 * others, network, rounds=4, received_bytes=received_bytes
    )
    return exchange + work_cost(network, copied_bytes=sum(one.union_rows for one in shares) * looks.values_bytes)
