"""Counts what this process sends: bytes and messages by label, the time spent waiting, and, on request, a timeline."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(slots=True)
class Count:
    """Payload bytes and messages that this rank sent."""

    bytes_sent: int = 0
    messages: int = 0

    def add(self, bytes_sent: int, messages: int) -> None:
        """Count one more exchange."""
        self.bytes_sent += bytes_sent
        self.messages += messages


@dataclass(frozen=True, slots=True)
class Span:
    """One stretch of time on the timeline, in seconds of `time.perf_counter`."""

    track: str
    name: str
    begin_s: float
    end_s: float
    bytes_sent: int = 0


@dataclass(slots=True)
class Traffic:
    """The counters of one process. Bytes are payload: no headers, no retransmissions.

    A collective's bytes are those of the algorithm that it stands for, sent by this rank: a ring all-reduce of
    M bytes over n ranks is 2(n-1)/n M, an all-gather of a part of m bytes is (n-1)m.
    """

    total: Count = field(default_factory=Count)
    by_label: dict[str, Count] = field(default_factory=dict)
    wait_s: float = 0.0
    step: int = 0
    is_tracing: bool = False
    spans: list[Span] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def sent(self, label: str | Mapping[str, int], bytes_sent: int, messages: int) -> None:
        """Count one exchange under `label`, or, where several tables travel together, under each by its share."""
        with self._lock:
            self.total.add(bytes_sent, messages)
            shares = {label: 1} if isinstance(label, str) else label
            whole = max(1, sum(shares.values()))
            for name, share in shares.items():
                self.by_label.setdefault(name, Count()).add(bytes_sent * share // whole, messages)

    def waited(self, seconds: float) -> None:
        """Count time that this process stood still for communication."""
        self.wait_s += seconds

    def span(self, track: str, name: str, begin_s: float, end_s: float, bytes_sent: int = 0) -> None:
        """Put a stretch of time on the timeline, if one is being recorded."""
        if self.is_tracing:
            with self._lock:
                self.spans.append(Span(track, name, begin_s, end_s, bytes_sent))

    def take_labels(self) -> dict[str, Count]:
        """The counts by label since the last call."""
        with self._lock:
            taken, self.by_label = self.by_label, {}
        return taken

    def take_spans(self) -> list[Span]:
        """The timeline since the last call."""
        with self._lock:
            taken, self.spans = self.spans, []
        return taken


traffic = Traffic()
"""This process's counters."""


def now_s() -> float:
    """The clock of the timeline, in seconds."""
    return time.perf_counter()
