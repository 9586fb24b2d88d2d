"""Reads the JSON lines of one rank into columns."""

import json
import math
from array import array
from bisect import bisect_left
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import repeat
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from tulle.errors import DataError
from tulle.report.observation import read_observation
from tulle.report.records import FloatArray, Observation, RankLog, Text

Key = TypeVar("Key", bound=Hashable)

NUMBERS = (
    "at",
    "step_s",
    "forward_s",
    "backward_s",
    "optimizer_s",
    "wait_s",
    "forward_wait_s",
    "backward_wait_s",
    "optimizer_wait_s",
    "bytes_sent",
    "messages",
    "loss",
    "tokens",
    "samples",
    "total_steps",
    "memory_peak_bytes",
)


@dataclass(frozen=True, slots=True)
class _Columns(Generic[Key]):
    """A column of numbers for each key, up to the last step that had one; `missing` where a step before had none."""

    missing: float
    by_key: dict[Key, "array[float]"] = field(default_factory=dict)

    def put(self, key: Key, place: int, number: float) -> None:
        """Set one number."""
        column = self.by_key.get(key)
        if column is None:
            column = self.by_key[key] = array("d")
        while len(column) <= place:
            column.append(self.missing)
        column[place] = number

    def make_room(self, place: int) -> None:
        """Move all from a place on by one."""
        for column in self.by_key.values():
            if place < len(column):
                column.insert(place, self.missing)

    def cut(self, place: int) -> None:
        """Forget all from a place on."""
        for column in self.by_key.values():
            del column[place:]

    def whole(self, length: int) -> dict[Key, FloatArray]:
        """Arrays of one length; a column of which all was forgotten is left out."""
        for column in self.by_key.values():
            column.extend(repeat(self.missing, length - len(column) if column else 0))
        return {key: np.array(column) for key, column in self.by_key.items() if column}


@dataclass(slots=True)
class _Read:
    """What was read of one rank's lines so far, `steps` ascending; a million steps are some hundred megabytes."""

    steps: "array[int]" = field(default_factory=lambda: array("q"))
    numbers: _Columns[str] = field(default_factory=lambda: _Columns(math.nan))
    values: _Columns[str] = field(default_factory=lambda: _Columns(math.nan))
    rows: _Columns[str] = field(default_factory=lambda: _Columns(math.nan))
    bytes_sent: _Columns[tuple[str, str]] = field(default_factory=lambda: _Columns(0.0))
    messages: _Columns[tuple[str, str]] = field(default_factory=lambda: _Columns(0.0))
    texts: dict[tuple[str, int], Text] = field(default_factory=dict)
    observations: dict[tuple[str, int], Observation] = field(default_factory=dict)
    torn_lines: int = 0
    odd_lines: int = 0
    last_step: int = 0
    """Of which there was a record; numbers that were logged apart from one may be of a step that is still to come."""

    @property
    def columns(self) -> tuple[_Columns[Any], ...]:
        """All columns beside the steps."""
        return self.numbers, self.values, self.rows, self.bytes_sent, self.messages

    def undo_from(self, step: int) -> None:
        """Forget what was recorded from a step on, because a resumed run trains it again."""
        place = bisect_left(self.steps, step)
        del self.steps[place:]
        for columns in self.columns:
            columns.cut(place)
        for kept in (self.texts, self.observations):
            for key in [key for key in kept if key[1] >= step]:
                del kept[key]

    def place_of(self, step: int) -> int:
        """Where a step stands; it is put there if it was not recorded."""
        place = bisect_left(self.steps, step)
        if place == len(self.steps):
            self.steps.append(step)
        elif self.steps[place] != step:
            self.steps.insert(place, step)
            for columns in self.columns:
                columns.make_room(place)
        return place


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
    return _log(rank, read)


def _add(record: Mapping[str, Any], read: _Read) -> None:
    kind, step = record["kind"], int(record["step"])
    if kind == "step":
        if step <= read.last_step:
            read.undo_from(step)
        read.last_step = step
        _add_step(record, read, read.place_of(step))
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
        _add_values(record, read, read.place_of(step))


def _add_step(record: Mapping[str, Any], read: _Read, place: int) -> None:
    for name in NUMBERS:
        number = record.get(name)
        if number is not None:
            read.numbers.put(name, place, _logged(number) if name == "loss" else float(number))
    _add_values(record, read, place)
    for name, sent in (record.get("traffic") or {}).items():
        key = name, str(sent["scheme"])
        read.bytes_sent.put(key, place, float(sent["bytes_sent"]))
        read.messages.put(key, place, float(sent.get("messages") or 0))
        if sent.get("rows") is not None:
            read.rows.put(name, place, float(sent["rows"]))


def _add_values(record: Mapping[str, Any], read: _Read, place: int) -> None:
    for name, value in (record.get("values") or {}).items():
        read.values.put(name, place, _logged(value))


def _lines(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            yield from (line for line in file if line.strip())
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}. Make it readable and try again.") from error


def _parse(line: bytes, path: Path, number: int) -> tuple[dict[str, Any] | None, bool]:
    """Return the record in `line` and whether a torn one was skipped.

    A rank that is killed leaves half a line; the first line of a resumed run may stand right behind it:
    `{"kind":"step","st{"kind":"step","step":8,...}`. A machine that falls may leave zeros where a line was to be.
    """
    for candidate in (line, line[max(line.rfind(b'{"kind"'), 0) :]):
        try:
            record = json.loads(candidate)
        except ValueError:
            continue
        if isinstance(record, dict):
            return record, candidate is not line
    if line.startswith((b"{", b"\0")):
        return None, True
    raise DataError(
        f"line {number} of {path} is not JSON: expected one object a line, as a run records it, but got "
        f"{line[:40].decode(errors='replace').strip()!r}. Delete the line, or run again."
    )


def _explain(error: Exception) -> str:
    return f"it has no {error}" if isinstance(error, KeyError) else str(error)


def _logged(value: float) -> float:
    """A number that the script logged; infinity if it was not finite, as NaN means that there was none."""
    return float(value) if math.isfinite(value) else math.inf


def _log(rank: int, read: _Read) -> RankLog:
    length = len(read.steps)
    numbers = {name: np.full(length, math.nan) for name in NUMBERS} | read.numbers.whole(length)
    return RankLog(
        rank=rank,
        steps=np.array(read.steps, dtype=np.int64),
        **numbers,
        values=read.values.whole(length),
        traffic=read.bytes_sent.whole(length),
        traffic_messages=read.messages.whole(length),
        rows=read.rows.whole(length),
        texts=tuple(read.texts.values()),
        observations=tuple(read.observations.values()),
        torn_lines=read.torn_lines,
        odd_lines=read.odd_lines,
    )
