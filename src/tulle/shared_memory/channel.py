"""`Channel`: what ranks of one host tell each other, through memory that all of them map.

Each rank has two slots of memory, which it writes in turn. What is to be sent is copied into one, messages tell the
others where it lies, and they read it there:

    rank 0   copies in | tells 1, 2 | hears 1, 2 | reads from 1 and 2
    rank 1   copies in | tells 0, 2 | hears 0, 2 | reads from 0 and 2

A slot is written again in the next exchange but one. By then all others have told of the exchange between, and whoever
tells of an exchange has read all of the slots before: nobody has to say so. What fits into a message goes in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import count
from weakref import ref

from torch import Tensor

from tulle.shared_memory.messages import CARRIED_BYTES, Connection, Place
from tulle.shared_memory.region import Region, aligned

_SLOTS = 2
_KEPT_BYTES = 64 << 20
"""A larger slot is let go with its next use."""


class Channel:
    """Among some ranks. All of them must tell the same in the same order, one thread of each at a time.

    Args:
        place: Of this rank among them.
        size: How many they are.
        connect: Connects to all others, by place.
    """

    def __init__(self, place: int, size: int, connect: Callable[[], dict[int, Connection]]) -> None:
        self.place, self.size = place, size
        self.others = [(place + k) % size for k in range(1, size)]
        """Places of the other ranks, the next one first."""
        self._connect = connect
        self._connections: dict[int, Connection] = {}
        self._slots: list[Region | None] = [None] * _SLOTS
        self._lent: dict[int, ref[Region]] = {}
        """By slot, the memory in which tensors lie that others may write in."""
        self._written = 0
        self._number = 0

    @property
    def is_open(self) -> bool:
        """Whether all have connected."""
        return bool(self._connections)

    def open(self) -> None:
        """Connect, and wait until all others have.

        Raises:
            OSError: If one has gone, or does not come in time.
        """
        self._connections = self._connect()

    def tell(self, contents: Mapping[int, Tensor]) -> int:
        """Send to each other rank, by its place, flat bytes that it is to read; a tensor for several is written once.

        Returns:
            The number by which to `hear` what they tell.
        """
        self._number += 1
        large = {other: content for other, content in contents.items() if not is_carried([content])}
        for other in self.others:
            if other not in large:  # nor into a slot with those: who gets little may go on before having looked at it
                self._connections[other].send(self._number, contents[other])
        if large:
            self._write(large)
        return self._number

    def lend(self, size_bytes: int) -> Tensor:
        """Zeros, as flat bytes in memory that the others can map."""
        self._lent = {slot: one for slot, one in self._lent.items() if one() is not None}
        slot = next(slot for slot in count(_SLOTS) if slot not in self._lent)
        region = Region.new(size_bytes)
        self._lent[slot] = ref(region)
        return region.bytes()[:size_bytes]

    def place_of(self, content: Tensor) -> Place | None:
        """Where flat bytes lie in memory that was lent; None if they lie elsewhere."""
        start = content.data_ptr()
        for slot, one in self._lent.items():
            region = one()
            if region is not None and region.address <= start <= region.address + len(region) - len(content):
                return Place(slot, start - region.address, region)
        return None

    def share(self, content: Tensor, where: Place) -> int:
        """Have all others read and write some bytes that lie in memory that was lent.

        Returns:
            The number by which to `hear` what they share.
        """
        self._number += 1
        for other in self.others:
            self._connections[other].send(self._number, content, where)
        return self._number

    def show(self, content: Tensor) -> tuple[int, Tensor]:
        """Have all others read some bytes that this rank may go on writing.

        Returns:
            The number by which to `hear` what they show, and the bytes in this rank's slot.
        """
        self._number += 1
        return self._number, self._write(dict.fromkeys(self.others, content))[id(content)]

    def hear(self, number: int, other: int, length: int) -> Tensor:
        """What another rank has told or shown: so many bytes, good until this rank tells again."""
        return self._connections[other].receive(number, length)

    def meet(self) -> None:
        """Tell all others that this rank has come so far, and wait until all have."""
        self._number += 1
        for other in self.others:
            self._connections[other].send(self._number)
        for other in self.others:
            self.hear(self._number, other, 0)

    def close(self) -> None:
        """End all connections, which fails what waits for them, here and there."""
        for connection in self._connections.values():
            connection.close()

    def _write(self, contents: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Copy what others are to read into the next slot, and tell them where it lies; give the copies by identity."""
        starts: dict[int, int] = {}
        end = 0
        for content in contents.values():
            if id(content) not in starts:
                starts[id(content)] = end
                end = aligned(end + len(content))
        slot = self._written % _SLOTS
        self._written += 1
        region = self._region(slot, end)
        memory = region.bytes()
        copies: dict[int, Tensor] = {}
        for other, content in contents.items():
            start = starts[id(content)]
            if id(content) not in copies:
                copies[id(content)] = memory[start : start + len(content)].copy_(content)
            self._connections[other].send(self._number, content, Place(slot, start, region))
        return copies

    def _region(self, slot: int, size_bytes: int) -> Region:
        region = self._slots[slot]
        if region is None or len(region) < size_bytes or len(region) > max(_KEPT_BYTES, size_bytes):
            self._slots[slot] = region = Region.new(size_bytes)
        return region


def is_carried(contents: Iterable[Tensor]) -> bool:
    """Whether each of some flat bytes fits into a message."""
    return all(len(content) <= CARRIED_BYTES for content in contents)
