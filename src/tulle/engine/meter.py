"""`Meter`: what the exchange of one table's gradient sends and takes, as its ranks tell each other a step later."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tulle.comm import Count
from tulle.cost import Cost

_MEMORY = 0.9
"""Weight of the past in the running mean of measured seconds."""


@dataclass(slots=True)
class Meter:
    """Keeps this rank's numbers of the last step until they are told with those of the next, and what all have told.

    Example:
        >>> meter = Meter()
        >>> meter.note("ring", Count(bytes_sent=800, messages=2), seconds=0.004)
        >>> meter.bytes_sent, meter.took_us
        (800, 4000)
        >>> meter.hear([800, 1000], [4000, 3000])  # the second rank came last, and waited for nobody
        >>> meter.measured
        Cost(bytes=1000, messages=2, seconds=0.003)
    """

    measured: Cost | None = None
    """What the rank that sent most sent in a step, and a running mean of what the exchange took the last to come."""
    took_us: int = 0
    """This rank's last exchange, its waiting for slower ranks included."""
    _measured_of: str = ""
    """The scheme that was measured."""
    _scheme: str = ""
    """That in force in the last step."""
    _sent: Count = field(default_factory=Count)
    """By this rank in the last step."""
    _sent_so_far: Count = field(default_factory=Count)

    @property
    def bytes_sent(self) -> int:
        """By this rank in the last step."""
        return self._sent.bytes_sent

    def note(self, scheme: str, sent_so_far: Count, seconds: float) -> None:
        """Take up a step of this rank.

        Args:
            scheme: That was in force.
            sent_so_far: For this table, in this step and all before.
            seconds: What the exchange took.
        """
        before = self._sent_so_far
        self._sent = Count(sent_so_far.bytes_sent - before.bytes_sent, sent_so_far.messages - before.messages)
        self._scheme, self._sent_so_far, self.took_us = scheme, sent_so_far, round(seconds * 1e6)

    def hear(self, bytes_sent: Sequence[int], took_us: Sequence[int]) -> None:
        """Take up what all ranks tell of their last step: who came last waited for nobody."""
        seconds = min(took_us) / 1e6
        if seconds:
            before = self.measured_of(self._scheme)
            mean_s = _MEMORY * before.seconds + (1 - _MEMORY) * seconds if before else seconds
            self._measured_of = self._scheme
            self.measured = Cost(max(bytes_sent), self._sent.messages, mean_s)

    def measured_of(self, scheme: str) -> Cost | None:
        """What was measured, if it was of this scheme."""
        return self.measured if self._measured_of == scheme else None
