"""Reads a run's folder: JSON files in, one frozen `Run` out."""

import json
import re
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from tulle.errors import DataError, PlanError
from tulle.plan import Plan
from tulle.report.observation import or_nan, read_candidates, read_characteristics
from tulle.report.ranklog import read_rank_log
from tulle.report.records import (
    Failure,
    Launch,
    Link,
    Measured,
    MeshShape,
    PlanChoices,
    Run,
    TableChoice,
)

Value = TypeVar("Value")


def read(run: Path) -> Run:
    """Read the folder of a run, as `tulle run` leaves it (also of one that still runs, or was killed).

    Args:
        run: the folder with `run.json`, `mesh.json`, `plan.json`, `rank-R.jsonl` and `failure-rank-R.json`.

    Raises:
        DataError: the folder is missing, holds no run, or one of its files is broken. A line that a rank
            was writing when it was killed is skipped and counted instead (`RankLog.torn_lines`).

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> _ = (folder / "run.json").write_text('{"command": ["train.py"], "processes": 1}')
        >>> _ = (folder / "rank-0.jsonl").write_text('{"kind": "step", "step": 1, "step_s": 0.5}')
        >>> read(folder).ranks[0].step_s
        array([0.5])
    """
    run = Path(run)
    _check_is_run(run)
    return Run(
        folder=run,
        launch=_read_optional(run / "run.json", _launch) or Launch(),
        mesh=_read_optional(run / "mesh.json", _mesh),
        plan=_read_optional(run / "plan.json", _plan),
        ranks=tuple(read_rank_log(path, rank) for rank, path in _numbered(run, r"rank-(\d+)\.jsonl")),
        failures=_failures(run),
        pieces=_read_optional(run / "profile.json", _pieces) or {},
    )


def _check_is_run(run: Path) -> None:
    if not run.is_dir():
        given = "a file" if run.exists() else "not there"
        raise DataError(
            f"{run} is {given}, but a report needs the folder of a run, as `tulle run` makes it. "
            "Give the folder that `tulle run` named at its start."
        )
    if not (run / "run.json").exists() and not any(run.glob("rank-*.jsonl")):
        found = ", ".join(sorted(path.name for path in run.iterdir())[:5]) or "nothing"
        raise DataError(
            f"{run} is not the folder of a run: it holds {found}, but neither run.json nor rank-0.jsonl. "
            "Give the folder that `tulle run` named at its start."
        )


def _numbered(run: Path, pattern: str) -> list[tuple[int, Path]]:
    matches = ((re.fullmatch(pattern, path.name), path) for path in run.iterdir())
    return sorted((int(match[1]), path) for match, path in matches if match)


def _read_optional(path: Path, parse: Callable[[Mapping[str, Any]], Value]) -> Value | None:
    return _read_object(path, parse) if path.exists() else None


def _read_object(path: Path, parse: Callable[[Mapping[str, Any]], Value]) -> Value:
    """Parse the one JSON object in `path`; one that cannot be understood is a `DataError`."""
    try:
        return parse(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}. Make it readable and try again.") from error
    except KeyError as error:
        raise DataError(
            f"{path} has no {error}, which a run records there. "
            "Was it edited by hand, or written by another version of tulle? Run again."
        ) from error
    except (ValueError, TypeError, AttributeError) as error:
        raise DataError(
            f"{path} is broken: expected one JSON object as a run records it, but {error}. "
            "Delete the file to draw the report without it, or run again."
        ) from error


def _launch(recorded: Mapping[str, Any]) -> Launch:
    started = recorded.get("started")
    return Launch(
        command=tuple(str(part) for part in recorded.get("command", ())),
        processes=int(recorded.get("processes", 0)),
        hosts=tuple(str(host) for host in recorded.get("hosts", ())),
        cores=recorded.get("cores"),
        started=datetime.fromisoformat(started) if started else None,
        versions={name: str(recorded[name]) for name in ("tulle", "torch", "python") if name in recorded},
    )


def _mesh(recorded: Mapping[str, Any]) -> MeshShape:
    return MeshShape(
        axes={str(name): int(size) for name, size in recorded["axes"].items()},
        backend=str(recorded["backend"]),
        device=str(recorded["device"]),
        network={str(axis): _link(link) for axis, link in (recorded.get("network") or {}).items() if link},
    )


def _link(recorded: Mapping[str, Any]) -> Link:
    return Link(float(recorded["latency_s"]), float(recorded["bandwidth_bytes_per_s"]))


def _plan(recorded: Mapping[str, Any]) -> PlanChoices:
    bucket_bytes = recorded.get("bucket_bytes")
    return PlanChoices(
        tables=tuple(_table(table) for table in recorded["tables"]),
        bucket_bytes=None if bucket_bytes is None else float(bucket_bytes),
        network=_link(recorded["network"]) if recorded.get("network") else None,
        whole=_whole(recorded),
    )


def _whole(recorded: Mapping[str, Any]) -> Plan | None:
    try:
        return Plan.from_json(recorded)
    except (PlanError, KeyError, TypeError, ValueError, AttributeError):  # of another version, or cut short
        return None


def _pieces(recorded: Mapping[str, Any]) -> dict[str, float]:
    return {str(one["name"]): float(one["forward_s"]) + float(one["backward_s"]) for one in recorded["modules"]}


def _table(recorded: Mapping[str, Any]) -> TableChoice:
    density = recorded.get("density")
    return TableChoice(
        name=str(recorded["name"]),
        rows=int(recorded["rows"]),
        width=int(recorded["width"]),
        density=None if density is None else float(density),
        scheme=str(recorded["scheme"]),
        reason=str(recorded.get("reason") or ""),
        candidates=read_candidates(recorded.get("candidates")),
        measured=_measured(recorded["measured"]) if recorded.get("measured") else None,
        characteristics=read_characteristics(recorded["characteristics"]) if recorded.get("characteristics") else None,
    )


def _measured(recorded: Mapping[str, Any]) -> Measured:
    return Measured(*(or_nan(recorded.get(name)) for name in ("bytes", "messages", "seconds")))


def _failures(run: Path) -> tuple[Failure, ...]:
    """All recorded failures, the earliest first: the others are often only its consequence."""
    found = _numbered(run, r"failure-rank-(\d+)\.json")
    return tuple(sorted((_read_object(path, _failure) for _, path in found), key=lambda failure: failure.at))


def _failure(recorded: Mapping[str, Any]) -> Failure:
    return Failure(
        rank=int(recorded["rank"]),
        step=recorded.get("step"),
        at=float(recorded.get("at") or 0.0),
        error=str(recorded["error"]),
        traceback=str(recorded.get("traceback") or ""),
    )
