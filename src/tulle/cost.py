"""Plain values of the cost model: what a network gives, what a gradient looks like, what an exchange costs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Network:
    """What one axis of a mesh offers, as measured by `tulle.comm.probe`.

    Args:
        latency_s: Seconds that one round of the smallest messages takes.
        bandwidth_bytes_per_s: Payload that one rank sends, and at once receives, per second.
    """

    latency_s: float
    bandwidth_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Characteristics:
    """What the gradient of one table looks like on the ranks of one axis in one step.

    Zen (OSDI'25, section 3.1) defines these over elements; an embedding's gradient is sparse by rows, so here
    they are over rows.

    Args:
        num_rows: Rows of the table.
        width: Columns of the table.
        value_bytes: Bytes of one value (4 for float32).
        rows_per_rank: Distinct rows that each rank holds, by rank.
    """

    num_rows: int
    width: int
    value_bytes: int
    rows_per_rank: tuple[int, ...]

    @property
    def density(self) -> float:
        """Mean share of the table's rows that one rank holds, 0 to 1: Zen's d_G."""
        if not self.num_rows or not self.rows_per_rank:
            return 0.0
        return sum(self.rows_per_rank) / len(self.rows_per_rank) / self.num_rows

    @property
    def index_bytes(self) -> int:
        """Bytes of one row number on the wire."""
        return 4 if self.num_rows <= 2**31 else 8

    @property
    def row_bytes(self) -> int:
        """Bytes of one row on the wire: its values and its number."""
        return self.width * self.value_bytes + self.index_bytes

    @property
    def dense_bytes(self) -> int:
        """Bytes of the whole table: Zen's M."""
        return self.num_rows * self.width * self.value_bytes


@dataclass(frozen=True, slots=True)
class Cost:
    """What an exchange costs the rank that pays most.

    Args:
        bytes: Payload that the rank sends.
        messages: Messages that the rank sends.
        seconds: Predicted time on a given network, the exchange alone.
    """

    bytes: int
    messages: int
    seconds: float


def exchange_cost(sent_bytes: float, messages: int, network: Network, *, rounds: int | None = None) -> Cost:
    """The alpha-beta cost: `rounds` latencies (one a message if not given) and `sent_bytes` through the link."""
    seconds = (messages if rounds is None else rounds) * network.latency_s
    return Cost(round(sent_bytes), messages, seconds + sent_bytes / network.bandwidth_bytes_per_s)
