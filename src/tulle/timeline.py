"""`Timeline`: what a rank did and when, as a trace for Chrome and Perfetto."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from tulle.comm import now_s, traffic
from tulle.whole_file import write_whole

_SPANS_KEPT = 200_000
"""A timeline ends after so many spans: about as much as a browser can show."""


class Timeline:
    """The spans of one rank.

    Args:
        rank: Whose they are.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._spans: list[dict[str, Any]] = []

    def keep_spans(self) -> None:
        """Take up what has ended since the last call, as long as there is room."""
        for span in traffic.take_spans():
            if len(self._spans) < _SPANS_KEPT:
                self._spans.append(
                    {
                        "name": span.name,
                        "ph": "X",
                        "pid": self._rank,
                        "tid": span.track,
                        "ts": span.begin_s * 1e6,
                        "dur": (span.end_s - span.begin_s) * 1e6,
                        "args": {"bytes_sent": span.bytes_sent},
                    }
                )

    def write(self, folder: Path) -> None:
        """Write it, once, into a run's folder."""
        # Ranks' clocks: perf_counter counts from the boot of a host, time from 1970: put all on the latter.
        offset_us = (time.time() - now_s()) * 1e6
        for span in self._spans:
            span["ts"] += offset_us
        path = folder / f"timeline-rank-{self._rank}.json"
        write_whole(path, json.dumps({"traceEvents": self._spans}) + "\n")
