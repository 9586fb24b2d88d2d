"""Reads the JSON lines of one rank into columns."""

import json
import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from tulle.errors import DataError
from tulle.report.observation import read_observation
from tulle.report.records import FloatArray, Observation, RankLog, Text

NUMBERS = (
    "at",
    "step_s",
    "forward_s",
    "backward_s",
    "optimizer_s",
    "wait_s",
    "bytes_sent",
    "messages",
    "loss",
    "tokens",
    "total_steps",
    "memory_peak_bytes",
)
LOSS = NUMBERS.index("loss")


@dataclass(frozen=True, slots=True)
class StepLine:
    """One step of one rank, as it stands in its line; `numbers` are in the order of `NUMBERS`."""

    step: int
    numbers: tuple[float, ...]
    values: Mapping[str, float]
    traffic: Mapping[tuple[str, str], tuple[float, float]]
    rows: Mapping[str, float]


@dataclass(slots=True)
class _Read:
    """What was read of one rank's lines so far; `lines` in the order of steps."""

    lines: list[StepLine] = field(default_factory=list)
    texts: dict[tuple[str, int], Text] = field(default_factory=dict)
    observations: dict[tuple[str, int], Observation] = field(default_factory=dict)
    torn_lines: int = 0
    odd_lines: int = 0

    def undo_from(self, step: int) -> None:
        """Forget what was recorded from a step on, because a resumed run trains it again."""
        del self.lines[bisect_left(self.lines, step, key=lambda line: line.step) :]
        for kept in (self.texts, self.observations):
            for key in [key for key in kept if key[1] >= step]:
                del kept[key]


def read_rank_log(path: Path, rank: int) -> RankLog:
    """Read `rank-R.jsonl`; of a step that was recorded twice, the later record counts.

    A run that is resumed goes back to its checkpoint's step: what it had recorded from there on was undone.
    """
    read = _Read()
    for number, line in enumerate(_lines(path), start=1):
        record, torn = _parse(line, path, number)
        read.torn_lines += torn
        try:
            if record is not None:
                _add(record, read)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DataError(
                f"line {number} of {path} is not a record of a step: {_explain(error)}. "
                "Was it edited by hand, or written by another version of tulle? Delete it, or run again."
            ) from error
    return _columns(rank, read)


def _add(record: Mapping[str, Any], read: _Read) -> None:
    kind, step = record["kind"], int(record["step"])
    lines = read.lines
    if kind == "step":
        if lines and lines[-1].step >= step:
            read.undo_from(step)
        lines.append(_step_line(record))
    elif kind == "text":
        text = Text(step, str(record["name"]), str(record["text"]))
        read.texts[text.name, text.step] = text
    elif kind == "characteristics":
        try:
            observation = read_observation(record)
        except (KeyError, TypeError, ValueError, AttributeError):  # it explains the run, and is not the run
            read.odd_lines += 1
        else:
            read.observations[observation.table, step] = observation
    elif kind == "values":  # numbers that were logged apart from a step's record, by an evaluation alone, say
        logged = _step_line(record)
        place = bisect_left(lines, step, key=lambda line: line.step)
        if place < len(lines) and lines[place].step == step:
            lines[place] = replace(lines[place], values={**lines[place].values, **logged.values})
        else:
            lines.insert(place, logged)


def _lines(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            yield from (line for line in file if line.strip())
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}. Make it readable and try again.") from error


def _parse(line: bytes, path: Path, number: int) -> tuple[dict[str, Any] | None, bool]:
    """Return the record in `line` and whether a torn one was skipped.

    A rank that is killed leaves half a line; the first line of a resumed run may stand right behind it:
    `{"kind":"step","st{"kind":"step","step":8,...}`.
    """
    for candidate in (line, line[max(line.rfind(b'{"kind"'), 0) :]):
        try:
            record = json.loads(candidate)
        except ValueError:
            continue
        if isinstance(record, dict):
            return record, candidate is not line
    if line.startswith(b"{"):
        return None, True
    raise DataError(
        f"line {number} of {path} is not JSON: expected one object a line, as a run records it, but got "
        f"{line[:40].decode(errors='replace').strip()!r}. Delete the line, or run again."
    )


def _explain(error: Exception) -> str:
    return f"it has no {error}" if isinstance(error, KeyError) else str(error)


def _step_line(record: Mapping[str, Any]) -> StepLine:
    numbers = [_number(record.get(name)) for name in NUMBERS]
    if record.get("loss") is not None:
        numbers[LOSS] = _logged(record["loss"])
    return StepLine(
        step=int(record["step"]),
        numbers=tuple(numbers),
        values={name: _logged(value) for name, value in (record.get("values") or {}).items()},
        traffic={
            (name, str(sent["scheme"])): (float(sent["bytes_sent"]), float(sent.get("messages") or 0))
            for name, sent in (record.get("traffic") or {}).items()
        },
        rows={
            name: float(sent["rows"])
            for name, sent in (record.get("traffic") or {}).items()
            if sent.get("rows") is not None
        },
    )


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)


def _logged(value: float) -> float:
    """A number that the script logged; infinity if it was not finite, as NaN means that there was none."""
    return float(value) if math.isfinite(value) else math.inf


def _columns(rank: int, read: _Read) -> RankLog:
    lines = read.lines
    numbers = np.array([line.numbers for line in lines], dtype=np.float64).reshape(len(lines), len(NUMBERS)).T
    traffic: dict[tuple[str, str], FloatArray] = {}
    traffic_messages: dict[tuple[str, str], FloatArray] = {}
    for index, line in enumerate(lines):
        for key, (bytes_sent, messages) in line.traffic.items():
            if key not in traffic:
                traffic[key], traffic_messages[key] = np.zeros(len(lines)), np.zeros(len(lines))
            traffic[key][index], traffic_messages[key][index] = bytes_sent, messages
    return RankLog(
        rank=rank,
        steps=np.array([line.step for line in lines], dtype=np.int64),
        **dict(zip(NUMBERS, numbers, strict=True)),
        values=_by_name([line.values for line in lines]),
        traffic=traffic,
        traffic_messages=traffic_messages,
        rows=_by_name([line.rows for line in lines]),
        texts=tuple(read.texts.values()),
        observations=tuple(read.observations.values()),
        torn_lines=read.torn_lines,
        odd_lines=read.odd_lines,
    )


def _by_name(lines: Sequence[Mapping[str, float]]) -> dict[str, FloatArray]:
    """Turn a mapping a step into a column a name; NaN where a step has no such name."""
    columns: dict[str, FloatArray] = {}
    for index, line in enumerate(lines):
        for name, value in line.items():
            if name not in columns:
                columns[name] = np.full(len(lines), math.nan)
            columns[name][index] = value
    return columns
