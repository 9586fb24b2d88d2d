"""`Packet`: row numbers and values of a step in one message, whose length all ranks know from the steps before.

    foretold    counts | row numbers | are they right? | values     three of four exchanges while the model computes
    packet      counts + row numbers + values                       one, when the gradients are there

However little travels, an exchange takes a processor about as long as gloo takes to send some hundred kilobytes: where
it is little, to hide three of them costs more than to leave them out. A packet has room for the rows of the fullest
rank of late and a few more. In a step in which some rank has more, all see it from the counts, and go the long way.

    message     values [room, width] | row numbers [room] | words: counts, and what else ranks tell each other
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tulle.comm import Deferred, all_gather_parts, release
from tulle.cost import Characteristics, Cost, Network, exchange_cost, work_cost
from tulle.mesh import Axis
from tulle.rows import Merge, RowSparse
from tulle.sync.numbers import numbers_bytes
from tulle.sync.reduce import ABSENT, COUNTS, Gradient, as_one, count, number_through, split_rows
from tulle.sync.table import Table

_WORD = torch.int64
_FORGETTING = 0.02
"""Part by which what the fullest rank holds nears what it holds now, in a step."""
WORDS = 3
"""That ranks tell each other of a table: its rows, and of the last step what was sent and how long it took."""
_SPARE = 0.03
"""Room of a packet beyond what the fullest rank held of late, as a part of that; its square root where that is more."""


def room_for(fullest_rows: float) -> int:
    """Rows that a packet has room for where the fullest rank holds so many."""
    return math.ceil(fullest_rows + max(_SPARE * fullest_rows, math.sqrt(fullest_rows)))


def packet_cost(looks: Characteristics, tables: int, network: Network, ranks: int) -> Cost:
    """What packets cost in which some tables travel whose gradients look like this, end to end.

    Example:
        >>> looks = Characteristics(num_rows=1000, width=16, value_bytes=4, rows_per_rank=(81, 64))
        >>> packet_cost(looks, 1, Network(latency_s=1e-3, bandwidth_bytes_per_s=1e8), 2)
        Cost(bytes=6144, messages=1, seconds=0.00106144)
    """
    room = room_for(max(looks.rows_per_rank))
    *_, end = _laid_out(room, looks.values_bytes, looks.index_bytes, WORDS * tables)
    return _cost(room, looks.values_bytes, end, network, ranks)


def is_in_packets(packet_s: float, scheme_s: float, network: Network) -> bool:
    """Whether rows are to travel in packets that take so long instead of by a scheme, by prediction.

    One exchange less to tell row numbers is in the predictions; one to tell counts goes besides.
    """
    return packet_s <= scheme_s + network.latency_s


@dataclass(slots=True, eq=False)
class Packet:
    """What all ranks know of a message before there is one.

    Args:
        tables: Of one width and dtype, on CPU.
        room: Rows that it can hold.
        words: How many numbers ranks tell each other, the counts of rows first.
    """

    tables: Sequence[Table]
    room: int
    words: int
    bytes: int = field(init=False)
    """Of the message: so many whole rows that those of all ranks lie in step in what is received."""
    _whole: Table = field(init=False)
    _row_bytes: int = field(init=False)
    _numbers_at: int = field(init=False)
    _words_at: int = field(init=False)

    def __post_init__(self) -> None:
        self._whole = as_one(self.tables, [0] * len(self.tables))
        self._row_bytes = self._whole.width * self._whole.wire.itemsize
        index_bytes = self._whole.index_dtype.itemsize
        laid_out = _laid_out(self.room, self._row_bytes, index_bytes, self.words)
        self._numbers_at, self._words_at, self.bytes = laid_out

    def seconds(self, network: Network, ranks: int) -> float:
        """Predicted, where all ranks have as many rows as there is room for."""
        return _cost(self.room, self._row_bytes, self.bytes, network, ranks).seconds

    def exchange(self, words: Sequence[int], gradients: Sequence[Gradient], axis: Axis) -> Deferred[Exchanged]:
        """Send it to every other rank. Every rank of the axis must call it.

        Args:
            words: This rank's, its counts of rows first.
            gradients: Of each table, coalesced. If they do not fit, or one is dense, only the words are told.
            axis: Whose ranks take part.
        """
        message = torch.empty(self.bytes, dtype=torch.uint8)
        message[self._words_at :].view(_WORD)[: self.words] = torch.tensor(words)
        counts = [count(gradient) for gradient in gradients]
        label = COUNTS
        if self.holds(counts):
            self._fill(message, gradients)
            label = self._shares(counts)
        gathered = all_gather_parts(message.view(1, -1), [1] * axis.size, axis, label=label)
        return Deferred(lambda: Exchanged(self, gathered.wait(), axis))

    def holds(self, counts: Sequence[int]) -> bool:
        """Whether one rank's gradients find room, by what it announces of each."""
        return all(rows >= 0 or rows == ABSENT for rows in counts) and sum(max(0, rows) for rows in counts) <= self.room

    def unpack(self, message: Tensor, counts: Sequence[int]) -> Tensor:
        """The row numbers in a message, int64, numbered through the tables."""
        held = sum(max(0, rows) for rows in counts)
        dtype = self._whole.index_dtype
        return message[self._numbers_at : self._words_at].view(dtype)[:held].long()

    def words_of(self, message: Tensor) -> list[int]:
        """The words in a message."""
        return message[self._words_at :].view(_WORD)[: self.words].tolist()

    def as_rows(self, received: Tensor) -> Tensor:
        """All that was received `[ranks, bytes]` as rows: of those of each rank the first ones are values."""
        return received.view(-1).view(self._whole.wire).view(-1, self._whole.width)

    @property
    def rows_apart(self) -> int:
        """In `as_rows` from a rank's first row to the next rank's."""
        return self.bytes // self._row_bytes

    def _shares(self, counts: Sequence[int]) -> dict[str, int]:
        """Of the bytes: of each table what its rows take by a scheme, the rest for that no counts were told before."""
        index_bytes = self._whole.index_dtype.itemsize
        shares = {
            table.name: round(max(0, rows) * self._row_bytes + numbers_bytes(max(0, rows), table.num_rows, index_bytes))
            for table, rows in zip(self.tables, counts, strict=True)
        }
        return shares | {COUNTS: self.bytes - sum(shares.values())}

    def _fill(self, message: Tensor, gradients: Sequence[Gradient]) -> None:
        rows = [gradient if isinstance(gradient, RowSparse) else None for gradient in gradients]
        numbers = number_through([None if held is None else held.indices for held in rows], self.tables)
        message[self._numbers_at : self._words_at].view(self._whole.index_dtype)[: len(numbers)] = numbers
        room = message[: self.room * self._row_bytes].view(self._whole.wire).view(self.room, self._whole.width)
        begin = 0
        for held in rows:
            if held is not None:
                room[begin : begin + len(held.values)] = held.values
                begin += len(held.values)


@dataclass(frozen=True, slots=True, eq=False)
class Exchanged:
    """The packets of all ranks.

    Args:
        packet: What they are.
        received: `[ranks, bytes]`.
        axis: Whose ranks took part.
    """

    packet: Packet
    received: Tensor
    axis: Axis

    def words(self) -> list[list[int]]:
        """Of each rank."""
        return [self.packet.words_of(message) for message in self.received]

    def sum(self, counts: Sequence[Sequence[int]]) -> list[RowSparse] | None:
        """Each table's gradient summed over the ranks, in their order; None if some rank's did not fit.

        Args:
            counts: What each rank announced of each table. Of a table that no rank has there is no sum: so None too.
        """
        packet = self.packet
        is_any_of_each = all(any(rows >= 0 for rows in of_ranks) for of_ranks in zip(*counts, strict=True))
        if not is_any_of_each or not all(map(packet.holds, counts)):
            return None
        held = [packet.unpack(message, rows) for message, rows in zip(self.received, counts, strict=True)]
        merge = Merge.of(torch.cat(held))
        places = torch.cat([torch.arange(len(rows)) + r * packet.rows_apart for r, rows in enumerate(held)])
        in_received = Merge(merge.rows, places.index_select(0, merge.order), merge.starts)
        sums = in_received.sum(packet.tables[0].from_wire(packet.as_rows(self.received)))
        release(self.received, self.axis)
        return split_rows(merge.rows, sums, packet.tables)


@dataclass(slots=True, eq=False)
class Room:
    """How many rows a packet should hold, the same on all ranks, as all hear the same counts."""

    fullest_rows: float = 0.0
    """Of all its tables on the rank that has most, of late; 0 if some table did not come by rows in the last step."""

    def fill(self, rows: Sequence[int]) -> None:
        """Take note of the rows that each rank holds of all its tables."""
        most = max(rows)
        self.fullest_rows = max(most, self.fullest_rows - _FORGETTING * (self.fullest_rows - most))

    def packet(
        self, tables: Sequence[Table], network: Network, ranks: int, *, words: int, scheme_s: float
    ) -> Packet | None:
        """In which the tables' rows should travel next; None where they go by their scheme, no slower by prediction.

        Args:
            tables: As those of `Packet`.
            network: What the axis gives.
            ranks: Of the axis.
            words: As those of `Packet`.
            scheme_s: Predicted seconds of the scheme in force; 0 where there is none.
        """
        is_known = scheme_s and self.fullest_rows
        if not is_known or not tables[0].width or tables[0].device.type != "cpu":
            return None
        packet = Packet(tables, room_for(self.fullest_rows), words)
        return packet if is_in_packets(packet.seconds(network, ranks), scheme_s, network) else None


def _laid_out(room: int, row_bytes: int, index_bytes: int, words: int) -> tuple[int, int, int]:
    """Where in a packet row numbers begin, where words, and where it ends."""
    numbers_at = _round_up(room * row_bytes, _WORD.itemsize)
    words_at = _round_up(numbers_at + room * index_bytes, _WORD.itemsize)
    step = math.lcm(max(1, row_bytes), _WORD.itemsize)  # a table may have no columns
    return numbers_at, words_at, _round_up(words_at + words * _WORD.itemsize, step)


def _cost(room: int, row_bytes: int, packet_bytes: int, network: Network, ranks: int) -> Cost:
    others, held_bytes = ranks - 1, ranks * room * row_bytes
    work = work_cost(network, summed_bytes=held_bytes, copied_bytes=held_bytes, numbers=ranks * room)
    return exchange_cost(others * packet_bytes, others, network, rounds=min(1, others)) + work


def _round_up(number: int, to: int) -> int:
    return -(-number // to) * to
