"""Runs one rank's script as `python script.py` would, and leaves word in the run folder if it fails.

`tulle run` starts this file by its path and it imports nothing but the standard library: until the script's
first line, the process is as Python would have made it.
"""

from __future__ import annotations

import ctypes
import json
import os
import runpy
import signal
import sys
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path
from types import TracebackType

_PR_SET_PDEATHSIG = 1  # of Linux' prctl(2)
_LAST_RECORDS_BYTES = 65_536
_STARTED_S = time.time()
_EXIT_WITHIN_S = 10.0


def main(arguments: list[str]) -> None:
    """Run `[kind, target, *arguments of the target]`, where `kind` is "script", "module" or "program"."""
    kind, target, *rest = arguments
    _end_with_the_launcher()
    _failure_file().unlink(missing_ok=True)  # of the attempt before, under --max-restarts
    os.dup2(1, 2)  # the rank's log has both streams, in the order in which they were written
    if kind == "program":
        os.execvp(target, [target, *rest])
    sys.argv = [target, *rest]
    try:
        _run_as_main(kind, target)
    except BaseException as error:
        if not (isinstance(error, SystemExit) and error.code in (None, 0)):
            with suppress(OSError):  # a full disk must not hide the error itself
                _leave_word(error)
            _exit_soon()
        _hide_own_frames()
        raise


def _run_as_main(kind: str, target: str) -> None:
    if not sys.flags.safe_path:
        folder = target if os.path.isdir(target) else os.path.dirname(os.path.realpath(target))
        sys.path[0] = os.getcwd() if kind == "module" else folder
    if kind == "module":
        runpy.run_module(target, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(target, run_name="__main__")


def _end_with_the_launcher() -> None:
    """A launcher that is killed outright cannot end its ranks; on Linux the kernel does it then."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _exit_soon() -> None:
    """A thread or an exit handler that waits for other ranks must not keep a failed rank alive."""
    timer = threading.Timer(_EXIT_WITHIN_S, os._exit, (1,))
    timer.daemon = True
    timer.start()


def _failure_file() -> Path:
    return Path(os.environ["TULLE_RUN_DIR"], f"failure-rank-{os.environ['RANK']}.json")


def _leave_word(error: BaseException) -> None:
    sys.stdout.flush()
    rank = int(os.environ["RANK"])
    exits = isinstance(error, SystemExit)
    trace = traceback.format_exception(type(error), error, _script_frames(error.__traceback__))
    word = {
        "rank": rank,
        "step": last_step(_failure_file().parent / f"rank-{rank}.jsonl", since_s=_STARTED_S),
        "at": time.time(),
        "error": _exit_text(error) if exits else f"{type(error).__qualname__}: {error}",
        "traceback": "" if exits else "".join(trace),
        # From here on the log holds the traceback, which the launcher shows in its own place.
        "log_bytes": None if exits else os.lseek(1, 0, os.SEEK_CUR),
    }
    write_json(_failure_file(), word)


def _exit_text(error: SystemExit) -> str:
    return f"exit code {error.code}" if isinstance(error.code, int) else f"exit: {error.code}"


def last_step(records: Path, *, since_s: float) -> int | None:
    """The number of the last step in a file of records, or None if there is none.

    Args:
        records: A rank's lines of JSON.
        since_s: Older records count as none: they are of an earlier run in the same folder.
    """
    with suppress(OSError), records.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _LAST_RECORDS_BYTES))
        for line in reversed(file.read().splitlines()):
            with suppress(ValueError, KeyError, TypeError):  # a line that was torn
                record = json.loads(line)
                return int(record["step"]) if record["at"] >= since_s else None
    return None


def write_json(path: Path, value: object, *, indent: int | None = 1) -> None:
    """Write `value` so that a reader finds the whole file or none: aside first, then renamed.

    Args:
        path: The file.
        value: What JSON can hold.
        indent: None for a long file that no person reads.
    """
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.write_text(json.dumps(value, indent=indent) + "\n", encoding="utf-8")
    aside.replace(path)


def _hide_own_frames() -> None:
    """Let the traceback that Python prints begin in the script, as it would without this file."""
    show = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        script = _script_frames(trace)
        show(kind, error.with_traceback(script), script)

    sys.excepthook = hook


def _script_frames(trace: TracebackType | None) -> TracebackType | None:
    while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, "<frozen runpy>"):
        trace = trace.tb_next
    return trace


if __name__ == "__main__":
    main(sys.argv[1:])
