"""`MailboxInOrder`: ranks that hold parts of one stage work on micro-batches in one order, that of the first of them.

A pipeline takes the next micro-batch by what has come, which differs in time from rank to rank. Ranks whose layers send
to one another while they run (split over axis `model`, or with tables split or parameters shared out over axis `data`)
must not differ:

    rank 0, model 0   F0  F1  B0      what has come is what the first rank says that has;
    rank 0, model 1   F0  F1  B0      the others wait until it has come to them too

All else that a rank does follows from that, so the answers are all that must be told.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from hashlib import blake2b

import torch

from tulle.comm import broadcast, lane
from tulle.errors import CommunicationError
from tulle.mesh import Axis
from tulle.pipeline.mailbox import Key, Mailbox

_LABEL = "order of micro-batches"
_ABSENT, _FAILED = -1, -2


class MailboxInOrder(Mailbox):
    """The messages of one process, which looks at them when its peers do.

    Args:
        axis: Of the pipeline.
        peers: Of ranks at the same place in it. Every rank of it must make one.
    """

    asks_peers = True

    def __init__(self, axis: Axis, peers: Axis) -> None:
        super().__init__(axis)
        self._peers = lane(peers, _LABEL)

    def has(self, key: Key) -> bool:
        """Whether the message is there, for the first of the peers; then it is here too."""
        if not self._is_open:  # outside of steps nothing is chosen
            return super().has(key)
        is_there = self._agreed(0 if self._is_leader and super().has(key) else _ABSENT, [key]) == 0
        if is_there:
            self._await_here(key)
        return is_there

    def await_any(self, wanted: Mapping[int, Collection[Key]], what: Callable[[], str]) -> None:
        """Wait until that message is there which came first to the first of the peers."""
        if not self._is_open:
            super().await_any(wanted, what)
            return
        keys = [key for of_rank in wanted.values() for key in of_rank]
        if self._is_leader:
            try:
                super().await_any(wanted, what)
            except CommunicationError:
                with suppress(CommunicationError):
                    self._agreed(_FAILED, keys)
                raise
            self._agreed(next(number for number, key in enumerate(keys) if super(MailboxInOrder, self).has(key)), keys)
        else:
            self._await_here(keys[self._agreed(_ABSENT, keys)])

    @property
    def _is_leader(self) -> bool:
        return self._peers.rank == 0

    def _agreed(self, found: int, keys: Collection[Key]) -> int:
        """What the first of the peers has found. All must call it, for the same messages."""
        asked = int.from_bytes(blake2b(repr(list(keys)).encode(), digest_size=7).digest(), "little")
        words = torch.tensor([found, asked], device=self._peers.device)
        broadcast(words, self._peers, label=_LABEL).wait()
        told, theirs = words.tolist()
        if theirs != asked:
            raise CommunicationError(
                f"rank {self._peers.rank} of axis {self._peers.name!r} waits for another value than rank 0, so that "
                "their layers would exchange what does not belong together: in a pipeline, ranks over which layers or "
                "tables are split, or parameters shared out (full_shard), must be given batches of the same shapes, "
                "padded to one length say, and take the same branches"
            )
        if told == _FAILED:
            raise CommunicationError(f"rank 0 of axis {self._peers.name!r} waited in vain: see its log")
        return told

    def _await_here(self, key: Key) -> None:
        if not super().has(key):
            super().await_any({rank: [key] for rank in self._others()}, lambda: "what has come to its peers")
