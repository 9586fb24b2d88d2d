"""`Bell`: wakes a thread that waits for several things at once."""

from __future__ import annotations

import select
import socket
from collections.abc import Collection
from contextlib import suppress

_RINGS = 4096


class Bell:
    """Rung by any thread, and waited for by one at a time; who does not wait hears of it later."""

    def __init__(self) -> None:
        self._here, self._there = socket.socketpair()
        self._here.setblocking(False)
        self._there.setblocking(False)

    def __del__(self) -> None:
        self._here.close()
        self._there.close()

    def ring(self) -> None:
        """Wake who waits."""
        with suppress(BlockingIOError):  # it has been rung often enough
            self._there.send(b"\0")

    def wait(self, descriptors: Collection[int], timeout_s: float) -> list[int] | None:
        """Wait until the bell is rung, or something can be read.

        Args:
            descriptors: From which.
            timeout_s: For how long; 0 to look only.

        Returns:
            Descriptors from which something can be read, or that have ended; None if time is over.
        """
        bell = self._here.fileno()
        poll = select.poll()
        for descriptor in (bell, *descriptors):
            poll.register(descriptor, select.POLLIN)
        ready = [descriptor for descriptor, _ in poll.poll(1e3 * timeout_s)]
        if bell in ready:
            self._here.recv(_RINGS)
        return [descriptor for descriptor in ready if descriptor != bell] if ready else None
