"""Merges the timelines of all ranks into one file for Perfetto or chrome://tracing."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from tulle.cli.rank import write_json

_log = logging.getLogger(__name__)


def merge(run: Path) -> Path | None:
    """Write `timeline.json` from `timeline-rank-R.json` of every rank, each as a process named "rank R".

    Args:
        run: The run folder.

    Returns:
        The file, or None if no rank left a timeline.
    """
    parts = {_rank(path): path for path in run.glob("timeline-rank-*.json")}
    if not parts:
        return None
    names: list[dict[str, Any]] = []
    events: list[dict[str, Any]] = []
    for rank, path in sorted(parts.items()):
        names += [_metadata(rank, "process_name", {"name": f"rank {rank}"})]
        names += [_metadata(rank, "process_sort_index", {"sort_index": rank})]
        for event in _read(path):
            if event.get("ph") == "M":
                if event.get("name") == "thread_name":
                    names.append(event | {"pid": rank})
            else:
                events.append(event | {"pid": rank})
    events.sort(key=lambda event: (event.get("ts", 0.0), event["pid"]))
    merged = run / "timeline.json"
    write_json(merged, {"traceEvents": names + events, "displayTimeUnit": "ms"}, indent=None)
    return merged


def _rank(path: Path) -> int:
    return int(path.stem.removeprefix("timeline-rank-"))


def _metadata(rank: int, name: str, arguments: dict[str, object]) -> dict[str, Any]:
    return {"ph": "M", "pid": rank, "tid": 0, "ts": 0, "name": name, "args": arguments}


def _read(path: Path) -> list[dict[str, Any]]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    except (ValueError, KeyError) as error:  # the rank died while it wrote
        _log.warning("%s is not a whole timeline (%s): left out", path, error)
        return []
