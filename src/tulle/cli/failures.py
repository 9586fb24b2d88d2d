"""Finds out which rank failed first, and says so before anything else."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import IntEnum
from pathlib import Path

from tulle.cli.launch import Ending
from tulle.cli.rank import last_step
from tulle.cli.tail import last_state

_LAST_LINES = 20
_LAST_BYTES = 16_384
_ERROR_CHARACTERS = 160

# What gloo, nccl and the store say when a process at the other end is no longer there.
_PEER_GONE = re.compile(
    r"^(Communication|DistNetwork|DistStore|DistBackend)Error|Connection (closed|reset|refused)|Broken pipe"
    r"|closed by (remote )?peer|ncclRemoteError|ncclSystemError|Socket Timeout|Application timeout",
    re.IGNORECASE,
)

# What gloo adds: where in its C++ it was, and advice that this text replaces.
_ADDED = re.compile(r"\[/\S+:\d+\] | This is typically caused by .*")


class Cause(IntEnum):
    """Why a rank ended; a lower cause explains a higher one."""

    OWN = 0
    """An exception of its own, an exit code, or a signal from outside."""
    PEER_GONE = 1
    """Another rank had gone."""
    ENDED = 2
    """The launcher ended it because another rank had failed."""


@dataclass(frozen=True, slots=True)
class Failure:
    """How one rank failed.

    Args:
        rank: The rank.
        cause: Why.
        at: When, in seconds since 1970.
        error: One sentence.
        traceback: Full text, empty if there is none.
        step: Last step whose numbers it recorded, None if there was none.
    """

    rank: int
    cause: Cause
    at: float
    error: str
    traceback: str = ""
    step: int | None = None

    def as_json(self) -> dict[str, object]:
        """What `--json` says of it."""
        return {"rank": self.rank, "step": self.step, "error": self.error}


def collect(run: Path, endings: Mapping[int, Ending], *, since_s: float) -> list[Failure]:
    """Every rank's failure, the one that explains the others first.

    Args:
        run: The run folder, where a rank that raised has left word.
        endings: How the ranks of this machine ended, by rank.
        since_s: When the run began, in seconds since 1970.

    Returns:
        The failures by cause, then by time.
    """
    words = {failure.rank: failure for failure in _words(run)}
    silent = [_silent(rank, ending) for rank, ending in endings.items() if rank not in words]
    # A rank writes its last record after its word, and one that was killed could leave no word.
    steps = {rank: last_step(run / f"rank-{rank}.jsonl", since_s=since_s) for rank in {*words, *endings}}
    failed = [replace(failure, step=steps[failure.rank]) for failure in (*words.values(), *silent)]
    return sorted(failed, key=lambda failure: (failure.cause, failure.at))


def _words(run: Path) -> Iterator[Failure]:
    for path in run.glob("failure-rank-*.json"):
        with suppress(OSError, ValueError, KeyError):
            word = json.loads(path.read_text(encoding="utf-8"))
            cause = Cause.PEER_GONE if _PEER_GONE.search(word["error"]) else Cause.OWN
            yield Failure(word["rank"], cause, word["at"], word["error"], word["traceback"])


def forget_interrupted(run: Path) -> None:
    """Take back the words of ranks that fell only because the run was interrupted: that is no failure to report."""
    for failure in _words(run):
        if failure.cause is Cause.PEER_GONE or failure.error.startswith(KeyboardInterrupt.__name__):
            (run / f"failure-rank-{failure.rank}.json").unlink(missing_ok=True)


def _silent(rank: int, ending: Ending) -> Failure:
    if ending.exit_code >= 0:
        return Failure(rank, Cause.OWN, ending.at, f"exit code {ending.exit_code}")
    number = -ending.exit_code
    # The launcher itself ends the others with SIGTERM, as soon as one has failed.
    cause = Cause.ENDED if number == signal.SIGTERM else Cause.OWN
    return Failure(rank, cause, ending.at, f"was killed by signal {signal_name(number)}")


def signal_name(number: int) -> str:
    """A signal by number and name.

    Example:
        >>> signal_name(9)
        '9 (SIGKILL)'
    """
    with suppress(ValueError):
        return f"{number} ({signal.Signals(number).name})"
    return str(number)


def describe(failures: list[Failure], logs: Mapping[int, Path]) -> str:
    """The text for the person at the terminal: the first failure in full, one line for each other rank.

    Args:
        failures: As `collect` returns them, at least one.
        logs: Each rank's log.
    """
    first, *others = failures
    lines = [headline(first), ""]
    if first.traceback:
        lines += [first.traceback.rstrip(), ""]
    elif (log := logs.get(first.rank)) and (last := last_lines(log)):
        lines += [f"The last lines that rank {first.rank} wrote:", *(f"  {line}" for line in last), ""]
    lines += [_also(other, first) for other in others]
    left = sorted({*logs} - {failure.rank for failure in failures})
    if first.cause is Cause.PEER_GONE and left:
        ranks = f"rank {left[0]}" if len(left) == 1 else f"ranks {', '.join(map(str, left))}"
        lines.append(f"{ranks} ended without an error: every rank must take as many steps (give all as many batches)")
    return "\n".join(lines)


def headline(failure: Failure) -> str:
    """One line that names the rank, the error and the step.

    Example:
        >>> headline(Failure(2, Cause.OWN, 0.0, "was killed by signal 9 (SIGKILL)", step=7))
        'rank 2 was killed by signal 9 (SIGKILL), after step 7; out of memory is the usual reason (see dmesg)'
    """
    when = "" if failure.step is None else f", after step {failure.step}"
    if failure.error.startswith("was killed"):
        hint = "; out of memory is the usual reason (see dmesg)" if "SIGKILL" in failure.error else ""
        return f"rank {failure.rank} {failure.error}{when}{hint}"
    return f"rank {failure.rank} failed first{when}: {_one_line(failure.error)}"


def _also(failure: Failure, first: Failure) -> str:
    if failure.cause is Cause.ENDED:
        return f"rank {failure.rank} was ended by the launcher, because rank {first.rank} had failed"
    if failure.cause is Cause.PEER_GONE and first.cause is Cause.OWN:
        return f"rank {failure.rank} fell because a peer had gone: {_one_line(failure.error)}"
    if failure.error == first.error:
        return f"rank {failure.rank} failed with the same error"
    verb = failure.error if failure.error.startswith("was killed") else f"failed too: {_one_line(failure.error)}"
    return f"rank {failure.rank} {verb}"


def _one_line(text: str) -> str:
    text = _ADDED.sub("", " ".join(text.split()))
    return text if len(text) <= _ERROR_CHARACTERS else text[: _ERROR_CHARACTERS - 1] + "…"


def last_lines(log: Path) -> list[str]:
    """The last lines of a log, empty if it is not there."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - _LAST_BYTES))
            text = file.read().decode(errors="replace").rstrip()
            return [last_state(line) for line in text.split("\n")[-_LAST_LINES:]] if text else []
    except OSError:
        return []
