"""`Packet`: row numbers and values of a step in one message, whose length all ranks know from the steps before.

    foretold    counts | row numbers | are they right? | values     three of four exchanges while the model computes
    packet      counts + row numbers + values                       one, when the gradients are there

However little travels, an exchange takes a processor about as long as gloo takes to send some hundred kilobytes: where
it is little, to hide three of them costs more than to leave them out. A packet has room for the rows of the fullest
rank of late and a few more. In a step in which some rank has more, all see it from the counts, and go the long way.

    message     values [room, width] | row numbers [room] | .. | words: counts, and what else ranks tell each other
                of tables of one width and dtype              of those of another
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tulle.comm import Deferred, all_gather_parts, release
from tulle.cost import Characteristics, Cost, Network, all_gather_cost, work_cost
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
_SLACK = 0.01
"""Part by which it may have more room than that before it is laid out anew, which takes a tenth of a millisecond."""


def room_for(fullest_rows: float) -> int:
    """Rows that a packet has room for where the fullest rank holds so many."""
    return math.ceil(fullest_rows + max(_SPARE * fullest_rows, math.sqrt(fullest_rows)))


def packet_cost(looks: Sequence[Characteristics], tables: int, network: Network, ranks: int) -> Cost:
    """What packets cost in which some tables travel, end to end.

    Args:
        looks: What gradients look like: of all tables of one width and dtype, then of those of another.
        tables: How many there are.
        network: What the axis gives.
        ranks: Of the axis.

    Example:
        >>> looks = Characteristics(num_rows=1000, width=16, value_bytes=4, rows_per_rank=(81, 64))
        >>> packet_cost([looks], 1, Network(latency_s=1e-3, bandwidth_bytes_per_s=1e8), 2)
        Cost(bytes=6144, messages=1, seconds=0.00106144)
    """
    kinds = [(room_for(max(look.rows_per_rank)), look.values_bytes, look.index_bytes) for look in looks]
    *_, end = _laid_out(kinds, WORDS * tables)
    return _cost([(room, row_bytes) for room, row_bytes, _ in kinds], end, network, ranks)


def is_in_packets(packet_s: float, scheme_s: float, network: Network) -> bool:
    """Whether rows are to travel in packets that take so long instead of by a scheme, by prediction.

    One exchange less to tell row numbers is in the predictions; one to tell counts goes besides.
    """
    return packet_s <= scheme_s + network.latency_s


@dataclass(frozen=True, slots=True, eq=False)
class Section:
    """What a packet holds of tables of one width and dtype, whose rows are numbered through.

    Args:
        members: Their positions among the packet's tables.
        room: Rows that it can hold.
    """

    members: Sequence[int]
    room: int


@dataclass(slots=True, eq=False)
class Packet:
    """What all ranks know of a message before there is one.

    Args:
        tables: On CPU.
        sections: Of each table one; all tables of a section have one width and dtype.
        words: How many numbers ranks tell each other, the counts of rows first.
    """

    tables: Sequence[Table]
    sections: Sequence[Section]
    words: int
    bytes: int = field(init=False)
    """Of the message: so many whole rows of each width that those of all ranks lie in step in what is received."""
    _places: Sequence[_Place] = field(init=False)
    _words_at: int = field(init=False)

    def __post_init__(self) -> None:
        of_sections = [[self.tables[t] for t in section.members] for section in self.sections]
        wholes = [as_one(tables, [0] * len(tables)) for tables in of_sections]
        kinds = [
            (section.room, whole.width * whole.wire.itemsize, whole.index_dtype.itemsize)
            for section, whole in zip(self.sections, wholes, strict=True)
        ]
        begins, self._words_at, self.bytes = _laid_out(kinds, self.words)
        self._places = [
            _Place(section.members, tables, whole, section.room, *begin)
            for section, tables, whole, begin in zip(self.sections, of_sections, wholes, begins, strict=True)
        ]

    def seconds(self, network: Network, ranks: int) -> float:
        """Predicted, where all ranks have as many rows as there is room for."""
        return _cost([(place.room, place.row_bytes) for place in self._places], self.bytes, network, ranks).seconds

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
            for place in self._places:
                place.fill(message, gradients)
            label = self._shares(counts)
        gathered = all_gather_parts(message.view(1, -1), [1] * axis.size, axis, label=label)
        return Deferred(lambda: Exchanged(self, gathered.wait(), axis))

    def holds(self, counts: Sequence[int]) -> bool:
        """Whether one rank's gradients find room, by what it announces of each."""
        if not all(rows >= 0 or rows == ABSENT for rows in counts):
            return False
        return all(place.rows(counts) <= place.room for place in self._places)

    def is_about(self, tables: Sequence[Table], needed: Sequence[Section]) -> bool:
        """Whether it is of these tables, with room for what is needed of them and little more."""
        if [*self.tables] != [*tables]:
            return False
        rooms = [(section.room, other.room) for section, other in zip(self.sections, needed, strict=True)]
        return all(least <= room <= (1 + _SLACK) * least for room, least in rooms)

    def words_of(self, message: Tensor) -> list[int]:
        """The numbers that a rank tells with its packet, from its message."""
        return message[self._words_at :].view(_WORD)[: self.words].tolist()

    def sum(self, received: Tensor, counts: Sequence[Sequence[int]]) -> list[RowSparse]:
        """Each table's gradient summed over the ranks `[ranks, bytes]`, all of whose rows are in it."""
        sums: dict[int, RowSparse] = {}
        for place in self._places:
            sums.update(zip(place.members, place.sum(received, counts), strict=True))
        return [sums[t] for t in range(len(self.tables))]

    def _shares(self, counts: Sequence[int]) -> dict[str, int]:
        """Of the bytes: of each table what its rows take by a scheme, the rest for that no counts were told before."""
        shares: dict[str, int] = {}
        for place in self._places:
            for t, table in zip(place.members, place.tables, strict=True):
                rows = max(0, counts[t])
                taken = rows * place.row_bytes + numbers_bytes(rows, table.num_rows, place.whole.index_dtype.itemsize)
                shares[table.name] = shares.get(table.name, 0) + round(taken)
        return shares | {COUNTS: self.bytes - sum(shares.values())}


@dataclass(frozen=True, slots=True, eq=False)
class _Place:
    """Where a section lies in a message.

    Args:
        members: Positions of its tables among the packet's.
        tables: They.
        whole: They as one.
        room: Rows that it can hold.
        values_at: Where its values begin, in bytes.
        numbers_at: Where its row numbers begin.
    """

    members: Sequence[int]
    tables: Sequence[Table]
    whole: Table
    room: int
    values_at: int
    numbers_at: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one row's values in the message."""
        return self.whole.width * self.whole.wire.itemsize

    def rows(self, counts: Sequence[int]) -> int:
        """That a rank has of all its tables, by what it announces of each table of the packet."""
        return sum(max(0, counts[t]) for t in self.members)

    def fill(self, message: Tensor, gradients: Sequence[Gradient]) -> None:
        """Write row numbers and values into a message."""
        given = [gradients[t] for t in self.members]
        rows = [gradient if isinstance(gradient, RowSparse) else None for gradient in given]
        numbers = number_through([None if one is None else one.indices for one in rows], self.tables)
        self._numbers(message, len(numbers)).copy_(numbers)
        values = message[self.values_at : self.values_at + self.room * self.row_bytes].view(self.whole.wire)
        values = values.view(self.room, self.whole.width)
        begin = 0
        for held in rows:
            if held is not None:
                values[begin : begin + len(held.values)] = held.values
                begin += len(held.values)

    def sum(self, received: Tensor, counts: Sequence[Sequence[int]]) -> list[RowSparse]:
        """Each of its tables' gradient summed over the ranks, in their order, from the messages `[ranks, bytes]`."""
        ranks, message_bytes = received.shape
        held = [
            self._numbers(message, self.rows(of_rank)).long() for message, of_rank in zip(received, counts, strict=True)
        ]
        merge = Merge.of(torch.cat(held))
        if self.whole.wire != self.whole.dtype or self.whole.dtype.itemsize < torch.float32.itemsize:
            sums = merge.sum(self._converted(received, [len(numbers) for numbers in held]))
        else:
            rows_apart = message_bytes // self.row_bytes  # from a rank's first row to the next rank's
            places = torch.cat([torch.arange(len(numbers)) + r * rows_apart for r, numbers in enumerate(held)])
            in_received = Merge(merge.rows, places.index_select(0, merge.order), merge.starts)
            end = self.values_at + (ranks - 1) * message_bytes + self.room * self.row_bytes
            values = received.view(-1)[self.values_at : end].view(self.whole.wire)
            sums = in_received.sum(values.view(-1, self.whole.width))
        return split_rows(merge.rows, sums, self.tables)

    def _converted(self, received: Tensor, rows: Sequence[int]) -> Tensor:
        """`[rows of all ranks, width]` in the gradient's dtype: of these alone, not of all that lies between them."""
        values = torch.empty(sum(rows), self.whole.width, dtype=self.whole.dtype)
        for part, message in zip(values.split(list(rows)), received, strict=True):
            held_bytes = len(part) * self.row_bytes
            part.view(-1).copy_(message[self.values_at : self.values_at + held_bytes].view(self.whole.wire))
        return values

    def _numbers(self, message: Tensor, rows: int) -> Tensor:
        """The first row numbers in a message, numbered through the tables."""
        dtype = self.whole.index_dtype
        return message[self.numbers_at : self.numbers_at + rows * dtype.itemsize].view(dtype)


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
        """The numbers that each rank has told."""
        return [self.packet.words_of(message) for message in self.received]

    def sum(self, counts: Sequence[Sequence[int]]) -> list[RowSparse] | None:
        """Each table's gradient summed over the ranks, in their order; None if some rank's did not fit.

        Args:
            counts: What each rank announced of each table. Of a table that no rank has there is no sum: so None too.
        """
        is_any_of_each = all(any(rows >= 0 for rows in of_ranks) for of_ranks in zip(*counts, strict=True))
        if not is_any_of_each or not all(map(self.packet.holds, counts)):
            return None
        sums = self.packet.sum(self.received, counts)
        release(self.received, self.axis)
        return sums


@dataclass(slots=True, eq=False)
class Room:
    """How many rows of some tables a packet should hold, the same on all ranks, as all hear the same counts."""

    fullest_rows: float = 0.0
    """Of all its tables on the rank that has most, of late; 0 if some table did not come by rows in the last step."""

    def fill(self, rows: Sequence[int]) -> None:
        """Take note of the rows that each rank holds of all its tables."""
        most = max(rows)
        self.fullest_rows = max(most, self.fullest_rows - _FORGETTING * (self.fullest_rows - most))


def next_packet(
    tables: Sequence[Table],
    rooms: Iterable[tuple[Sequence[int], Room]],
    network: Network,
    ranks: int,
    *,
    words: int,
    scheme_s: float,
    last: Packet | None = None,
) -> Packet | None:
    """In which the tables' rows should travel next; None where they go by their schemes, no slower by prediction.

    Args:
        tables: That are summed together.
        rooms: For which of them, of one width and dtype, by position.
        network: What the axis gives.
        ranks: Of the axis.
        words: As those of `Packet`.
        scheme_s: Predicted seconds of the schemes in force, together; 0 where one has none.
        last: What it gave for these tables before, the same on all ranks; kept while its room is about what is needed.
    """
    rooms = [*rooms]
    is_known = scheme_s and all(room.fullest_rows for _, room in rooms)
    if not is_known or not all(table.width and table.device.type == "cpu" for table in tables):
        return None
    sections = [Section(members, room_for(room.fullest_rows)) for members, room in rooms]
    packet = last if last is not None and last.is_about(tables, sections) else Packet(tables, sections, words)
    return packet if is_in_packets(packet.seconds(network, ranks), scheme_s, network) else None


def _laid_out(kinds: Sequence[tuple[int, int, int]], words: int) -> tuple[list[tuple[int, int]], int, int]:
    """Where in a packet values and row numbers of each kind of tables begin, where words, and where it ends.

    Args:
        kinds: Rows that there is room for, and bytes of one's values and of its number.
        words: How many.
    """
    begins: list[tuple[int, int]] = []
    at, step = 0, _WORD.itemsize
    for room, row_bytes, index_bytes in kinds:
        numbers_at = _round_up(at + room * row_bytes, _WORD.itemsize)
        begins.append((at, numbers_at))
        at = _round_up(numbers_at + room * index_bytes, _WORD.itemsize)
        step = math.lcm(step, max(1, row_bytes))  # a table may have no columns
    return begins, at, _round_up(at + words * _WORD.itemsize, step)


def _cost(kinds: Sequence[tuple[int, int]], packet_bytes: int, network: Network, ranks: int) -> Cost:
    """Of packets with room for so many rows of so many bytes."""
    held_bytes = ranks * sum(room * row_bytes for room, row_bytes in kinds)
    numbers = ranks * sum(room for room, _ in kinds)
    work = work_cost(network, summed_bytes=held_bytes, copied_bytes=held_bytes, numbers=numbers)
    return all_gather_cost([packet_bytes] * ranks, network) + work


def _round_up(number: int, to: int) -> int:
    return -(-number // to) * to
