"""Tries every case of `failures.py` on every library: `python benchmarks/sparse-sync/peers/failures_table.py`.

Two ranks each, in the libraries' environments in `.peers`. Prints a table, and writes `failures.json` beside this file.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from tempfile import TemporaryFile

import catalogue
from failures import CASES, LIBRARIES

RANKS = 2
TIMEOUT_S, GRACE_S = 60.0, 10.0
ENVIRONMENTS = {"ddp": "torch", "horovod": "horovod", "deepspeed": "deepspeed"}


def main() -> None:
    """All cases on all libraries."""
    print("| case | " + " | ".join(LIBRARIES) + " |")
    print("|---" * (len(LIBRARIES) + 1) + "|")
    verdicts: dict[str, dict[str, str]] = {}
    for case in CASES:
        verdicts[case] = {library: verdict(library, case) for library in LIBRARIES}
        print(f"| {case} | " + " | ".join(verdicts[case].values()) + " |", flush=True)
    (catalogue.HERE / "failures.json").write_text(json.dumps(verdicts, indent=1) + "\n")


def verdict(library: str, case: str) -> str:
    """What the ranks say, the worst of them; that they hang; or the error of one that fell."""
    peer = ENVIRONMENTS.get(library)
    python = str(catalogue.PEERS[peer].python()) if peer else sys.executable
    command = [python, str(catalogue.HERE / "failures.py"), "--library", library, "--case", case]
    with TemporaryFile("w+") as errors:
        ranks = [
            subprocess.Popen(command, env=os.environ | variables, stdout=subprocess.PIPE, stderr=errors, text=True)
            for variables in _environments()
        ]
        codes = _wait(ranks)
        said = [rank.communicate()[0].splitlines() for rank in ranks]
        errors.seek(0)
        if any(code not in (0, None) for code in codes):
            return f"fails: {_reason(errors.read().splitlines())}"
    if None in codes:
        return "hangs"
    return max(lines[-1] for lines in said)  # "wrong" comes after "right"


def _wait(ranks: Sequence[subprocess.Popen[str]]) -> list[int | None]:
    """Each one's exit code, None if it had to be ended: where one falls, the others get a moment."""
    deadline_s = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline_s and None in (codes := [rank.poll() for rank in ranks]):
        if any(codes):
            deadline_s = min(deadline_s, time.monotonic() + GRACE_S)
        time.sleep(0.1)
    codes = [rank.poll() for rank in ranks]
    for rank in ranks:
        rank.kill()
    return codes


def _environments() -> list[dict[str, str]]:
    """Torchrun's variables for each rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {"WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    common |= catalogue.environment() | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    return [common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(RANKS)]


def _reason(lines: Sequence[str]) -> str:
    """The first line that names an error."""
    named = (line.strip() for line in lines if "Error: " in line or "terminate called" in line)
    return next(named, "no reason given").rpartition("]: ")[2][:140].replace("|", "/")


if __name__ == "__main__":
    main()
