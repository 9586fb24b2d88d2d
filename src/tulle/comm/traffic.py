"""Counts what this process sends: bytes and messages by label, the time spent waiting, and, on request, a timeline."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from tulle.board import begin, count_steps


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
    """Since somebody last took them."""
    wait_s: float = 0.0
    step: int = 0
    """The number of the step that is under way, or was last: of it errors speak."""
    ended: int = 0
    """That of the last one whose backward has ended: after it a rank leaves."""
    begun: int = 0
    """How many backwards have begun whose gradients travel."""
    is_followed: bool = False
    """Whether others are told so."""
    is_tracing: bool = False
    spans: list[Span] = field(default_factory=list)
    is_background: threading.local = field(default_factory=threading.local)
    """Has a `flag` in threads that work beside backward: their waiting holds nobody up."""
    _ever: dict[str, Count] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(self, step: int) -> None:
        """A backward begins whose gradients travel; or what is sent in its stead.

        Args:
            step: The number of the step.
        """
        self.step = step
        self.begun += 1
        if self.is_followed:
            begin(self.begun)

    def sent(self, label: str | Mapping[str, int], bytes_sent: int, messages: int) -> None:
        """Count one exchange under `label`, or, where several tables travel together, under each by its share."""
        with self._lock:
            self.total.add(bytes_sent, messages)
            shares = {label: 1} if isinstance(label, str) else label
            whole = max(1, sum(shares.values()))
            for name, share in shares.items():
                for counts in (self.by_label, self._ever):
                    counts.setdefault(name, Count()).add(bytes_sent * share // whole, messages)

    def sent_for(self, label: str) -> Count:
        """What was sent under a label since the process began."""
        with self._lock:
            return replace(self._ever.get(label, Count()))

    def waited(self, seconds: float) -> None:
        """Count time that this process stood still for communication."""
        if not hasattr(self.is_background, "flag"):
            self.wait_s += seconds

    def span(self, track: str, name: str, begin_s: float, end_s: float, bytes_sent: int = 0) -> None:
        """Put a stretch of time on the timeline, if one is being recorded."""
        if self.is_tracing:
            track = "tables" if track == "waiting" and hasattr(self.is_background, "flag") else track
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
count_steps(lambda: traffic.ended)


def covered_s(spans: Iterable[Span]) -> float:
    """Seconds in which at least one of the spans was going on.

    Example:
        >>> covered_s([Span("waiting", "a", 1.0, 3.0), Span("waiting", "b", 2.0, 2.5), Span("waiting", "c", 5.0, 6.0)])
        3.0
    """
    total_s, end_s = 0.0, float("-inf")
    for span in sorted(spans, key=lambda span: span.begin_s):
        total_s += max(0.0, span.end_s - max(end_s, span.begin_s))
        end_s = max(end_s, span.end_s)
    return total_s


def under_way_and_waited_s(spans: Iterable[Span]) -> tuple[float, float]:
    """Of a timeline, seconds with communication under way, and those in which the training loop stood still for it."""
    spans = [span for span in spans if span.track != "computation"]
    return covered_s(spans), covered_s(span for span in spans if span.track == "waiting")


def now_s() -> float:
    """The clock of the timeline, in seconds."""
    return time.perf_counter()
