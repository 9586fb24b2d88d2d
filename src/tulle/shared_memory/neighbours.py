"""`Neighbours`: which processes can share memory with this one, and connections to them.

Processes find each other by sockets of Unix' domain in the abstract namespace, which belong to a network namespace and
vanish with their process. What travels through them are file descriptors of memory, and short messages; when a process
ends, the others see its connections end.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256

from tulle.shared_memory.region import Region

SWITCH = "TULLE_SHARED_MEMORY"
"""A variable of the environment: 0 has all ranks exchange through the network, also those of one host."""
_BACKLOG = 1024
_LOOK_S = 0.05
_HELLO_BYTES = sha256().digest_size
_HELLO_S = 10.0


@dataclass(eq=False)
class Neighbours:
    """This process' socket, and what it knows of the others'.

    Args:
        listener: Where others connect; None where memory cannot be shared, or must not be.
        address: Of it; empty if there is none.
    """

    listener: socket.socket | None
    address: str
    _addresses: Sequence[str] = ()
    _reached: Sequence[frozenset[int]] = ()
    _come: dict[bytes, socket.socket] = field(default_factory=dict)
    """Connections that were made and are not wanted yet, by what was said in them."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def listening(cls, environment: Mapping[str, str] = os.environ) -> Neighbours:
        """A process that others may connect to, if the system can do it and nobody forbids it."""
        if environment.get(SWITCH) == "0":
            return cls(None, "")
        address = f"tulle-{os.getpid()}-{secrets.token_hex(8)}"
        try:
            Region.new(1)
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            listener.bind(f"\0{address}")
        except (OSError, AttributeError):  # a sandbox without one of them, files that must be small, or no Linux
            return cls(None, "")
        listener.listen(_BACKLOG)
        listener.settimeout(_LOOK_S)
        return cls(listener, address)

    def reach(self, addresses: Sequence[str]) -> frozenset[int]:
        """The ranks to whom this process can connect, itself among them, by the addresses of all ranks.

        Those of another host, or of another network namespace of this one, are not there.
        """
        self._addresses = addresses
        found: set[int] = set()
        for rank, address in enumerate(addresses if self.listener is not None else ()):
            with suppress(OSError):
                if address:
                    _connected(address).close()
                    found.add(rank)
        return frozenset(found)

    def know(self, reached: Sequence[frozenset[int]]) -> None:
        """What all ranks found of each other, which is the same on all of them."""
        self._reached = reached

    def can_share(self, ranks: Sequence[int]) -> bool:
        """Whether each of some ranks, by their numbers among all, reaches all others of them: the same on all ranks."""
        return all(self._reached[rank].issuperset(ranks) for rank in ranks)

    def connect(self, rank: int, key: str) -> socket.socket:
        """Connect to a rank, which must `accept` the same key.

        Raises:
            OSError: If it has gone.
        """
        made = _connected(self._addresses[rank])
        made.send(_hello(key))
        return made

    def accept(self, key: str, timeout_s: float) -> socket.socket:
        """The connection that another process made with this key.

        Raises:
            TimeoutError: If it did not come.
        """
        deadline_s, hello = time.monotonic() + timeout_s, _hello(key)
        while time.monotonic() < deadline_s:
            with self._lock:
                if hello not in self._come:
                    self._take()
                if hello in self._come:
                    return self._come.pop(hello)
        raise TimeoutError(f"no connection came within {timeout_s:g} s")

    def close(self) -> None:
        """Let nobody connect any more."""
        if self.listener is not None:
            self.listener.close()

    def _take(self) -> None:
        """Take one connection that was made, and see for what it is."""
        assert self.listener is not None, "processes that do not share memory do not connect"
        try:
            made, _ = self.listener.accept()
        except TimeoutError:
            return
        made.settimeout(_HELLO_S)
        with suppress(OSError):
            hello = made.recv(_HELLO_BYTES) if _is_own(made) else b""
            if hello:  # else it was made to see whether that can be done
                self._come[hello] = made
                return
        made.close()


def _hello(key: str) -> bytes:
    """What is said first in a connection: a key, which names all ranks of a group, may be of any length."""
    return sha256(key.encode()).digest()


def _connected(address: str) -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        made.connect(f"\0{address}")
        if not _is_own(made):
            raise PermissionError(f"{address} is another user's")
    except BaseException:
        made.close()
        raise
    return made


def _is_own(connection: socket.socket) -> bool:
    """Whether a process of the same user is at the other end: abstract names have no permissions."""
    told = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return struct.unpack("3i", told)[1] == os.geteuid()
