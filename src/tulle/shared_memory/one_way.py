"""`Sender` and `Receiver`: messages of any size from one rank to another of its host.

    rank 0   takes a slot | writes there | tells 1 . . . . . . . . . . . . . . . . hears that it was read: a free slot
    rank 1                                 . . . hears | copies it out | tells 0

What is small goes in what is told, and nobody answers. What is large lies in memory that is made for it alone, and is
the receiver's from then on. A sender waits for nobody: what finds no room is kept, and a thread sends it when there is.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress

import torch
from torch import Tensor

from tulle.shared_memory.messages import CARRIED_BYTES, Connection, Place
from tulle.shared_memory.region import Region, unseen

_SLOTS = 16
"""Messages in memory that may be unread; each slot has two file descriptors open at the sender's end."""
_ONCE = _SLOTS
"""Stands for the slot of what is large."""
_LARGE_BYTES = 16 << 20


class Sender:
    """To one rank. One thread at a time may call it.

    Args:
        connection: To a `Receiver` there.
        timeout_s: How long to wait for the other to read something.
    """

    def __init__(self, connection: Connection, timeout_s: float) -> None:
        self._connection = connection
        self._timeout_s = timeout_s
        self._number = 0
        self._slots: dict[int, Region] = {}
        self._unread: deque[tuple[int, int]] = deque()
        """Number and slot of what lies in memory and was not read yet, the oldest first."""
        self._kept: deque[Tensor] = deque()
        self._progress = threading.Condition()
        """Its lock is held to change what is kept; notified when some of that was sent."""
        self._thread: threading.Thread | None = None
        """Sends what is kept; while there is one, no other thread sends, or hears what was read."""

    @property
    def waiting(self) -> int:
        """How many messages are kept, or lie in memory and were not read yet, as far as is known."""
        return len(self._kept) + len(self._unread)

    def send(self, size_bytes: int, write: Callable[[Tensor], object]) -> None:
        """Send a message without waiting.

        Args:
            size_bytes: Of it.
            write: Writes it into flat bytes that it is given.

        Raises:
            RuntimeError: If the other has gone.
            OSError: If the system has no memory for it.
        """
        with unseen():
            if self._thread is None and self._send(size_bytes, write):
                return
            message = torch.empty(size_bytes, dtype=torch.uint8, device="cpu")
            write(message)
            self._keep(message)

    def flush(self, *, but: int) -> None:
        """Wait until all but the latest `but` messages that lie in memory have been read.

        Raises:
            RuntimeError: If the other has gone, or reads nothing in time.
        """
        while self.waiting > but:
            if self._thread is None:
                self._hear()
            else:
                self._await_thread()

    def settle(self) -> None:
        """Wait a while until all has been sent, which is there for the other even when this process has ended."""
        if (thread := self._thread) is not None:
            thread.join(self._timeout_s)

    def close(self) -> None:
        """End it, which fails what waits for it, here and there; what was sent can still be read."""
        self._connection.close()

    def __del__(self) -> None:
        self.close()

    def _send(self, size_bytes: int, write: Callable[[Tensor], object]) -> bool:
        """Send a message if there is room for it now, and say whether there was."""
        if size_bytes <= CARRIED_BYTES:
            message = torch.empty(size_bytes, dtype=torch.uint8, device="cpu")
            place = None
        else:
            while self._unread and self._connection.has_heard(self._unread[0][0]):
                self._unread.popleft()
            if len(self._unread) == _SLOTS:
                return False
            place = self._room(size_bytes)
            message = place.region.bytes()[:size_bytes]
        write(message)
        if not self._connection.try_to_send(self._number + 1, message, place):
            return False
        self._number += 1
        if place is not None:
            self._unread.append((self._number, place.slot))
        return True

    def _room(self, size_bytes: int) -> Place:
        if size_bytes > _LARGE_BYTES:
            return Place(_ONCE, 0, Region.new(size_bytes))
        taken = {slot for _, slot in self._unread}
        fitting = [
            (len(one), slot) for slot, one in self._slots.items() if len(one) >= size_bytes and slot not in taken
        ]
        if fitting:
            _, slot = min(fitting)
        else:
            free = [slot for slot in range(_SLOTS) if slot not in taken]
            slot = next((one for one in free if one not in self._slots), free[0])
            self._slots[slot] = Region.new(size_bytes)
        return Place(slot, 0, self._slots[slot])

    def _hear(self) -> None:
        """Wait until the oldest of what is in memory was read."""
        self._connection.receive(self._unread[0][0], 0)
        self._unread.popleft()

    def _keep(self, message: Tensor) -> None:
        with self._progress:
            self._kept.append(message)
            if self._thread is None:
                self._thread = threading.Thread(target=self._send_kept, name="tulle-kept-messages", daemon=True)
                self._thread.start()

    def _send_kept(self) -> None:
        while True:
            with self._progress:
                if not self._kept:
                    self._thread = None
                    self._progress.notify_all()
                    return
            try:
                with unseen():
                    self._send_patiently(self._kept[0])
            except (RuntimeError, OSError):  # the other has gone: whoever sends next, or waits for it, learns of that
                with self._progress:
                    self._kept.clear()
                continue
            with self._progress:
                self._kept.popleft()
                self._progress.notify_all()

    def _send_patiently(self, message: Tensor) -> None:
        while not self._send(len(message), lambda memory: memory.copy_(message)):
            if len(self._unread) == _SLOTS:
                self._connection.await_message()
            else:
                self._connection.await_room()

    def _await_thread(self) -> None:
        with self._progress:
            if self._thread is not None and not self._progress.wait(self._timeout_s):
                raise RuntimeError(f"Timed out after {self._timeout_s:g} s, waiting for messages to be read")


class Receiver:
    """From one rank. One thread at a time may call it.

    Args:
        connection: To a `Sender` there.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    @property
    def descriptor(self) -> int:
        """That of the connection: when it can be read, `receive` does not wait."""
        return self._connection.descriptor

    def receive(self) -> Tensor:
        """Wait, for however long, for the next message: flat bytes, the caller's own.

        Raises:
            RuntimeError: If the other has gone.
        """
        with unseen():
            number, slot, message = self._connection.next()
            if slot == _ONCE:
                self._connection.forget(_ONCE)
            else:
                message = message.clone()
            if slot is not None:
                with suppress(RuntimeError):  # one that has gone needs no answer
                    self._connection.send(number)
            return message

    def close(self) -> None:
        """End it, which fails what waits for it, here and there."""
        self._connection.close()

    def __del__(self) -> None:
        self.close()
