"""Plain values of the cost model: what a network gives, what a gradient looks like, what an exchange costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from tulle.partition import scatter
from tulle.presence import Presence, presence_like


@dataclass(frozen=True, slots=True)
class Network:
    """What one axis of a mesh offers, as measured by `tulle.comm.probe`; what was not measured costs nothing.

    Args:
        latency_s: Seconds that the smallest exchange takes in which each rank sends to each other.
        bandwidth_bytes_per_s: Payload that one rank sends, and at once receives, per second.
        all_reduce_latency_s: Seconds of the smallest all-reduce; None means two latencies a further rank.
        all_reduce_bytes_per_s: Payload that one rank sends per second in a large all-reduce; None means `bandwidth`.
        sum_bytes_per_s: Rows that one rank adds up per second, in bytes read, while all ranks do so.
        copy_bytes_per_s: Rows that one rank gathers into fresh memory per second, in bytes, while all ranks do so.
        number_s: Seconds for one row number to be sorted among others, while all ranks do so.
        pair_latency_s: Seconds that the smallest exchange of two ranks takes; None means `latency_s`.
        gather_bytes_per_s: Payload that one rank receives per second in a large all-gather, where each part goes to
            every other host once, or to memory that all ranks share; None where it goes to every rank by itself.
        local_ranks: Ranks of one host, where the hosts of the axis are known and have several each.
        inside: The network among the ranks of one host.
        across: The network between hosts, for one rank of each, while all of them use it.
    """

    latency_s: float
    bandwidth_bytes_per_s: float
    all_reduce_latency_s: float | None = None
    all_reduce_bytes_per_s: float | None = None
    sum_bytes_per_s: float = float("inf")
    copy_bytes_per_s: float = float("inf")
    number_s: float = 0.0
    pair_latency_s: float | None = None
    gather_bytes_per_s: float | None = None
    local_ranks: int = 1
    inside: Network | None = None
    across: Network | None = None

    def faster(self, factor: float) -> Network:
        """The same with links of so many times the rate; latencies, work, and what is nested stay."""
        reduced, gathered = self.all_reduce_bytes_per_s, self.gather_bytes_per_s
        return replace(
            self,
            bandwidth_bytes_per_s=factor * self.bandwidth_bytes_per_s,
            all_reduce_bytes_per_s=None if reduced is None else factor * reduced,
            gather_bytes_per_s=None if gathered is None else factor * gathered,
        )


@dataclass(frozen=True, slots=True)
class Characteristics:
    """What the gradient of one table looks like on the ranks of one axis in one step.

    Zen (OSDI'25, section 2.3) defines the ratios over elements; an embedding's gradient is sparse by rows, so here they
    are over rows. Two of them need to know which rows each rank holds; where only the numbers are known, they are
    those of rows drawn by Zipf's law, as words of a text are.

    Args:
        num_rows: Rows of the table.
        width: Columns of the table.
        value_bytes: Bytes of one value on the wire (4 for float32).
        rows_per_rank: Distinct rows that each rank holds, by rank.
        presence: Which rows each rank holds, if that was measured.
    """

    num_rows: int
    width: int
    value_bytes: int
    rows_per_rank: tuple[int, ...]
    presence: Presence | None = field(default=None, compare=False, repr=False)

    def __str__(self) -> str:
        """Rows, and the ratios.

        Example:
            >>> print(Characteristics(10, 8, 4, (2, 3)))
            2 to 3 of 10 rows on each of 2 ranks: density 0.25, overlap 0.5, densification 1.6, skewness 1.667
        """
        least, most = min(self.rows_per_rank, default=0), max(self.rows_per_rank, default=0)
        held = f"{most:,}" if least == most else f"{least:,} to {most:,}"
        return (
            f"{held} of {self.num_rows:,} rows on each of {len(self.rows_per_rank)} ranks: density {self.density:.4g}, "
            f"overlap {self.overlap_ratio:.4g}, densification {self.densification_ratio:.4g}, "
            f"skewness {self.skewness_ratio:.4g}"
        )

    @staticmethod
    def end_to_end(parts: Sequence[Characteristics]) -> Characteristics:
        """What gradients of tables of one width look like whose rows are numbered through, so that they are one.

        Example:
            >>> small, large = (Characteristics(rows, 16, 4, (3, 5)) for rows in (10, 1000))
            >>> both = Characteristics.end_to_end([small, large])
            >>> both.num_rows, both.rows_per_rank
            (1010, (6, 10))
        """
        if len(parts) == 1:
            return parts[0]
        held = tuple(sum(rows) for rows in zip(*(part.rows_per_rank for part in parts), strict=True))
        presence = _end_to_end([part.spread for part in parts], [part.num_rows for part in parts])
        return replace(parts[0], num_rows=sum(part.num_rows for part in parts), rows_per_rank=held, presence=presence)

    @property
    def density(self) -> float:
        """Mean share of the table's rows that one rank holds, 0 to 1: Zen's d_G."""
        return self._mean_rows / self.num_rows if self.num_rows else 0.0

    @property
    def overlap_ratio(self) -> float:
        """`|I_1 n I_2| / min(|I_1|, |I_2|)`, mean over the pairs of ranks that both hold rows, 0 to 1."""
        return self.spread.overlap_ratio()

    @property
    def densification_ratio(self) -> float:
        """`d_G^n / d_G`: rows that any of the n ranks holds, by the mean of what one holds, 1 to n: Zen's gamma^n."""
        return self.union_rows / self._mean_rows if self._mean_rows else 1.0

    @property
    def densification_curve(self) -> tuple[float, ...]:
        """The densification ratio of the first 1, 2, ... n ranks."""
        return tuple(rows / self._mean_rows if self._mean_rows else 1.0 for rows in self.spread.growth())

    @property
    def skewness_ratio(self) -> float:
        """`max_i d_Gi / d_G` over n equal contiguous parts, mean over ranks, 1 (even) to n (all in one): Zen's s^n."""
        return self.spread.skewness_ratio(self.num_rows)

    @property
    def union_rows(self) -> int:
        """Distinct rows that any rank holds."""
        return round(len(self.spread.rows) / self.spread.share)

    @property
    def spread(self) -> Presence:
        """Which rows each rank holds: measured, or drawn by Zipf's law where only the numbers are known."""
        return self.presence or presence_like(self.num_rows, self.rows_per_rank)

    @property
    def index_bytes(self) -> int:
        """Bytes of one row number on the wire."""
        return 4 if self.num_rows <= 2**31 else 8

    @property
    def values_bytes(self) -> int:
        """Bytes of one row's values on the wire."""
        return self.width * self.value_bytes

    @property
    def row_bytes(self) -> int:
        """Bytes of one row on the wire: its values and its number."""
        return self.values_bytes + self.index_bytes

    @property
    def dense_bytes(self) -> int:
        """Bytes of the whole table: Zen's M."""
        return self.num_rows * self.values_bytes

    def among(self, members: Sequence[int]) -> Characteristics:
        """The same gradient on some of the ranks."""
        held = tuple(self.rows_per_rank[rank] for rank in members)
        return replace(self, rows_per_rank=held, presence=self.spread.among(members))

    def at(self, ranks: int) -> Characteristics:
        """The same gradient on so many ranks: the first of them, or more that hold rows as these do."""
        if ranks == len(self.rows_per_rank) or not self.rows_per_rank:
            return self
        held = tuple(self.rows_per_rank[r % len(self.rows_per_rank)] for r in range(ranks))
        presence = None if self.presence is None else self.presence.at(held, self.num_rows)
        return replace(self, rows_per_rank=held, presence=presence)

    @property
    def _mean_rows(self) -> float:
        return sum(self.rows_per_rank) / len(self.rows_per_rank) if self.rows_per_rank else 0.0


@dataclass(frozen=True, slots=True)
class Cost:
    """What an exchange costs.

    Args:
        bytes: Payload that the rank that sends most sends.
        messages: Messages that it sends.
        seconds: Predicted time on a given network, from the moment when all ranks have their rows.
    """

    bytes: int
    messages: int
    seconds: float

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.bytes + other.bytes, self.messages + other.messages, self.seconds + other.seconds)


NOTHING = Cost(0, 0, 0.0)
"""The cost of what does not happen."""


def percent(share: float) -> str:
    """A share, for people: small ones with two digits.

    Example:
        >>> percent(0.0785), percent(4.096e-05), percent(0.0)
        ('7.85%', '0.0041%', '0.00%')
    """
    return f"{100 * share:.2g}%" if 0 < share < 1e-3 else f"{share:.2%}"


def exchange_cost(
    sent_bytes: float, messages: int, network: Network, *, rounds: int | None = None, received_bytes: float = 0.0
) -> Cost:
    """The alpha-beta cost: `rounds` latencies (one a message if not given) and the fuller direction of the link."""
    seconds = (messages if rounds is None else rounds) * network.latency_s
    busy_bytes = max(sent_bytes, received_bytes)
    return Cost(round(sent_bytes), messages, seconds + busy_bytes / network.bandwidth_bytes_per_s)


def all_gather_cost(sizes_bytes: Sequence[float], network: Network) -> Cost:
    """An all-gather of a part of so many bytes from each rank, all at once: who sends or receives most sets the pace.

    Example:
        >>> all_gather_cost([1e6, 3e6], Network(latency_s=1e-3, bandwidth_bytes_per_s=1e8))
        Cost(bytes=3000000, messages=1, seconds=0.031)
    """
    others, most_bytes = max(0, len(sizes_bytes) - 1), max(sizes_bytes, default=0)
    rate = network.gather_bytes_per_s
    if rate is None:
        busy_bytes = max(others * most_bytes, sum(sizes_bytes) - min(sizes_bytes, default=0))
        rate = network.bandwidth_bytes_per_s
    else:
        busy_bytes = _sent_once_bytes(sizes_bytes, network.local_ranks)
    seconds = min(1, others) * network.latency_s + busy_bytes / rate
    return Cost(round(others * most_bytes), others * (most_bytes > 0), seconds)


def _sent_once_bytes(sizes_bytes: Sequence[float], local_ranks: int) -> float:
    """What counts where a part goes to each other host once, or to memory of all; of even parts what a rank gets."""
    ranks = len(sizes_bytes)
    if not 1 < local_ranks < ranks:
        return sum(sizes_bytes) - min(sizes_bytes, default=0)
    of_hosts = [sum(sizes_bytes[first : first + local_ranks]) for first in range(0, ranks, local_ranks)]
    on_link_bytes = max((len(of_hosts) - 1) * max(of_hosts), sum(of_hosts) - min(of_hosts))
    return on_link_bytes * (ranks - 1) / (ranks - local_ranks)


def all_reduce_cost(tensor_bytes: float, network: Network, ranks: int) -> Cost:
    """A ring all-reduce of a dense tensor by the backend: `2 (n - 1) / n M` in `2 (n - 1)` messages."""
    messages = 2 * (ranks - 1)
    sent_bytes = messages / ranks * tensor_bytes
    latency_s = network.all_reduce_latency_s
    if latency_s is None:
        latency_s = messages * network.latency_s
    rate = network.all_reduce_bytes_per_s or network.bandwidth_bytes_per_s
    return Cost(round(sent_bytes), messages, (latency_s if messages else 0.0) + sent_bytes / rate)


def work_cost(network: Network, *, summed_bytes: float = 0.0, copied_bytes: float = 0.0, numbers: float = 0.0) -> Cost:
    """What a rank does by itself: rows added up, rows put into fresh memory, row numbers sorted."""
    seconds = summed_bytes / network.sum_bytes_per_s + copied_bytes / network.copy_bytes_per_s
    return Cost(0, 0, seconds + numbers * network.number_s)


def _end_to_end(parts: Sequence[Presence], lengths: Sequence[int]) -> Presence:
    """Which rows are held of tables of such lengths, numbered through; all sampled as the one of the smallest share."""
    share = min(part.share for part in parts)
    rows: list[Tensor] = []
    held: list[Tensor] = []
    first = 0
    for part, length in zip(parts, lengths, strict=True):
        is_kept = scatter(part.rows, 1) < share / part.share * 2**31
        rows.append(part.rows[is_kept] + first)
        held.append(part.held[:, is_kept])
        first += length
    return Presence(torch.cat(rows), torch.cat(held, dim=1), share)
