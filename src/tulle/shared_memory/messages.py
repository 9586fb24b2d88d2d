"""`Connection`: short messages to one other process and back: what they tell of is in them, or lies in memory."""

from __future__ import annotations

import array
import os
import select
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from tulle.shared_memory.region import Region, mapped

CARRIED_BYTES = 8 * 1024
"""A message carries so much at most; more lies in a region."""
_HEADER = struct.Struct("<qqqq")
_NOWHERE = -1
_DESCRIPTOR_BYTES = socket.CMSG_SPACE(array.array("i").itemsize)
_AT_ONCE, _CLOSED_ON_EXEC, _CUT = map(int, (socket.MSG_DONTWAIT, socket.MSG_CMSG_CLOEXEC, socket.MSG_CTRUNC))
"""As plain numbers: Python puts flags together in 3 us."""
_TIME = struct.Struct("ll")
_EMPTY = torch.empty(0, dtype=torch.uint8, device="cpu")


@dataclass(frozen=True, slots=True)
class Place:
    """Where something lies.

    Args:
        slot: A number for the memory, which others know it by.
        offset: In bytes.
        region: The memory.
    """

    slot: int
    offset: int
    region: Region


class Connection:
    """To one rank. What a message carried is good until the next one comes from there.

    Args:
        rank: Number of the other among all ranks.
        made: The socket.
        timeout_s: For each message; 0 for any time.
    """

    def __init__(self, rank: int, made: socket.socket, timeout_s: float) -> None:
        self._rank = rank
        self._socket = made
        self._timeout_s = timeout_s
        self._process = os.getpid()
        made.settimeout(None)  # the system's own time-outs cost no further call
        limit = _TIME.pack(int(timeout_s), int(timeout_s % 1 * 1e6))
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            made.setsockopt(socket.SOL_SOCKET, option, limit)
        self._told: dict[int, ref[Region]] = {}
        """By slot, the regions that the other knows."""
        self._known: dict[int, Tensor] = {}
        """The other's, as bytes."""
        self._buffer = bytearray(_HEADER.size + CARRIED_BYTES)
        self._carried = torch.frombuffer(self._buffer, dtype=torch.uint8)[_HEADER.size :]

    @property
    def descriptor(self) -> int:
        """Of the socket."""
        return self._socket.fileno()

    def send(self, number: int, content: Tensor | None = None, place: Place | None = None) -> None:
        """Send a message.

        Args:
            number: Of the exchange, or of a part of it: both count alike.
            content: Flat bytes: as many as a message carries, or those that lie at the place.
            place: Where they lie.

        Raises:
            RuntimeError: If the other has gone, or does not take it in time.
        """
        try:
            self._send(number, content, place)
        except OSError as error:
            raise self._failed(error) from error

    def try_to_send(self, number: int, content: Tensor | None = None, place: Place | None = None) -> bool:
        """Send a message, unless there is no room for it now.

        Returns:
            Whether there was.

        Raises:
            RuntimeError: If the other has gone.
        """
        try:
            self._send(number, content, place, _AT_ONCE)
        except BlockingIOError:
            return False
        except OSError as error:
            raise self._failed(error) from error
        return True

    def receive(self, number: int, length: int) -> Tensor:
        """What the other sends as the message of this number: flat bytes.

        Args:
            number: As the other counts.
            length: How many bytes come.

        Raises:
            RuntimeError: If the other has gone, sends nothing in time, or something else, or it cannot be reached.
        """
        theirs, _, content = self.next()
        self._check(theirs, len(content), number, length)
        return content

    def next(self) -> tuple[int, int | None, Tensor]:
        """The next message: its number, the slot in which its content lies, if in one, and that, flat bytes.

        Raises:
            RuntimeError: If the other has gone, or sends nothing in time.
        """
        try:
            return self._next()
        except OSError as error:
            raise self._failed(error) from error

    def has_heard(self, number: int) -> bool:
        """Whether the message of this number, of which nothing but that is told, is there; then it is taken.

        Raises:
            RuntimeError: If the other has gone, or sent something else.
        """
        try:
            theirs, _, content = self._next(_AT_ONCE)
        except BlockingIOError:
            return False
        except OSError as error:
            raise self._failed(error) from error
        self._check(theirs, len(content), number, 0)
        return True

    def await_message(self) -> None:
        """Wait, for however long, until a message is there, or none will come any more."""
        self._await(select.POLLIN)

    def await_room(self) -> None:
        """Wait, for however long, until there is room for another message, or nobody to take it."""
        self._await(select.POLLOUT)

    def forget(self, slot: int) -> None:
        """Let go of the other's memory of this number; it lasts as long as a tensor in it."""
        del self._known[slot]

    def close(self) -> None:
        """End it, for both; a process that was forked meanwhile only lets go of it."""
        if os.getpid() == self._process:
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)  # wakes whoever waits for it in another thread
        self._socket.close()

    def _check(self, theirs: int, their_length: int, number: int, length: int) -> None:
        if (theirs, their_length) != (number, length):
            raise RuntimeError(
                f"rank {self._rank} sent {their_length:,} bytes as message {theirs} where {length:,} bytes as message "
                f"{number} were expected: all ranks must begin the same exchanges, of one size, in one order"
            )

    def _send(self, number: int, content: Tensor | None, place: Place | None, flags: int = 0) -> None:
        length = 0 if content is None else len(content)
        ancillary: list[tuple[int, int, array.array[int]]] = []
        if place is None:
            header = _HEADER.pack(number, length, _NOWHERE, 0)
            parts: Sequence[object] = [header] if content is None or not length else [header, content.numpy()]
        else:
            parts = [_HEADER.pack(number, length, place.offset, place.slot)]
            told = self._told.get(place.slot)
            if told is None or told() is not place.region:
                descriptor = array.array("i", [place.region.descriptor])
                ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptor)]
        self._socket.sendmsg(parts, ancillary, flags)  # type: ignore[arg-type]
        if place is not None and ancillary:
            self._told[place.slot] = ref(place.region)

    def _next(self, how: int = 0) -> tuple[int, int | None, Tensor]:
        try:
            taken, ancillary, flags, _ = self._take(how)
        except ConnectionResetError:  # told once, before what the other sent last, where it left something unread
            taken, ancillary, flags, _ = self._take(how)
        if not taken:
            raise self._failed(None)
        if flags & _CUT:  # what is known by the slot's number is not what it tells of
            raise RuntimeError(
                f"no file descriptor was left to reach what rank {self._rank} sent: let processes have more of them "
                "(ulimit -n)"
            )
        number, length, offset, slot = _HEADER.unpack_from(self._buffer)
        for _, _, descriptor in ancillary:
            self._known[slot] = mapped(array.array("i", descriptor)[0])
        if offset == _NOWHERE:
            return number, None, self._carried[:length] if length else _EMPTY
        return number, slot, self._known[slot][offset : offset + length]

    def _await(self, event: int) -> None:
        poll = select.poll()
        poll.register(self._socket, event)
        poll.poll()

    def _take(self, how: int) -> tuple[int, list[tuple[int, int, bytes]], int, Any]:
        return self._socket.recvmsg_into([self._buffer], _DESCRIPTOR_BYTES, _CLOSED_ON_EXEC | how)

    def _failed(self, error: OSError | None) -> RuntimeError:
        if isinstance(error, BlockingIOError):
            return RuntimeError(f"Timed out after {self._timeout_s:g} s, waiting for rank {self._rank}")
        told = "" if error is None else f" ({error.strerror})"
        return RuntimeError(f"Connection closed by peer: rank {self._rank} has ended, or given up{told}")
