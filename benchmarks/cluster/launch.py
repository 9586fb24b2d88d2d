"""Runs one command per rank and waits: the first rank that fails ends all the others."""

from __future__ import annotations

import contextlib
import ctypes
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import IO, TextIO

from addresses import Addresses
from hosts import ClusterError, inside

GRACE_S = 2.0  # between asking a rank to end and ending it
TAIL_LINES = 20
_PR_SET_PDEATHSIG = 1  # from <linux/prctl.h>
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


class RankError(ClusterError):
    """A rank ended with an exit code other than 0, the first one to do so; or was still running at the time limit."""

    def __init__(self, message: str, rank: int, exit_code: int, stderr_tail: str) -> None:
        super().__init__(f"{message}; the last lines of its stderr:\n{stderr_tail or '(none)'}")
        self.rank = rank
        self.exit_code = exit_code
        self.stderr_tail = stderr_tail


def rank_environment(addresses: Addresses, rank: int, ranks_per_host: int, port: int) -> dict[str, str]:
    """What torchrun tells a rank, and which interface gloo shall use. Ranks are dealt to hosts in blocks."""
    return {
        "MASTER_ADDR": addresses.address(0),
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "WORLD_SIZE": str(addresses.hosts * ranks_per_host),
        "LOCAL_RANK": str(rank % ranks_per_host),
        "LOCAL_WORLD_SIZE": str(ranks_per_host),
        "GROUP_RANK": str(rank // ranks_per_host),
        "GLOO_SOCKET_IFNAME": "eth0",
        "OMP_NUM_THREADS": "1",
    }


class Rank:
    """One rank's process, in a process group of its own, and what it has printed so far."""

    def __init__(self, number: int, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.number = number
        self.process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )
        self.printed = {"stdout": bytearray(), "stderr": bytearray()}
        self.shown = {"stdout": 0, "stderr": 0}
        self.ended = os.pidfd_open(self.process.pid)

    def pipe(self, name: str) -> IO[bytes]:
        """The read end of `stdout` or `stderr`."""
        pipe = self.process.stdout if name == "stdout" else self.process.stderr
        assert pipe is not None
        return pipe

    def read(self, name: str, echo: TextIO | None) -> bool:
        """Take what `stdout` or `stderr` has for us, and show its whole lines; False at its end."""
        chunk = os.read(self.pipe(name).fileno(), 1 << 16)
        self.printed[name] += chunk
        end = self.printed[name].rfind(b"\n") + 1 if chunk else len(self.printed[name])
        if echo is not None and end > self.shown[name]:
            for line in self.text(name, self.shown[name], end).splitlines():
                print(f"[{self.number}] {line}", file=echo, flush=True)
            self.shown[name] = end
        return bool(chunk)

    def text(self, name: str, begin: int = 0, end: int | None = None) -> str:
        """What it printed to `stdout` or `stderr`."""
        return self.printed[name][begin:end].decode(errors="replace")

    def failure(self, message: str, exit_code: int) -> RankError:
        """The error that says so of this rank."""
        tail = "\n".join(self.text("stderr").splitlines()[-TAIL_LINES:])
        return RankError(f"rank {self.number} {message}", self.number, exit_code, tail)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the rank and all that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def close(self) -> None:
        """Give back what it held of ours."""
        os.close(self.ended)
        self.pipe("stdout").close()
        self.pipe("stderr").close()


def run_ranks(
    commands: Sequence[tuple[Sequence[str], Mapping[str, str]]], *, timeout_s: float | None, echo: bool
) -> list[str]:
    """Run rank 0, 1, ... with the given commands and environments; return what each printed to stdout.

    Raises `RankError` for the first rank that fails or, at the time limit, for the first that still runs. However
    this ends, no process of any rank is left.
    """
    ranks: list[Rank] = []
    try:
        for number, (command, environment) in enumerate(commands):
            ranks.append(Rank(number, command, environment))
        _wait(ranks, None if timeout_s is None else time.monotonic() + timeout_s, echo=echo)
        return [rank.text("stdout") for rank in ranks]
    finally:
        _end(ranks)


def in_namespace(namespace: str, command: Sequence[str], environment: Mapping[str, str]) -> tuple[list[str], dict]:
    """A rank's command and whole environment, on the host whose namespace it is."""
    return inside(namespace, list(command)), {**os.environ, **environment}


def _wait(ranks: list[Rank], deadline_s: float | None, *, echo: bool) -> None:
    """Read pipes until every rank has ended well, in the order in which things happen."""
    running = {rank.number for rank in ranks}
    streams = {"stdout": sys.stdout, "stderr": sys.stderr} if echo else {"stdout": None, "stderr": None}
    with selectors.DefaultSelector() as selector:
        for rank in ranks:
            selector.register(rank.ended, selectors.EVENT_READ, (rank, "ended"))
            for name in streams:
                selector.register(rank.pipe(name), selectors.EVENT_READ, (rank, name))
        while running:
            patience_s = None if deadline_s is None else deadline_s - time.monotonic()
            if patience_s is not None and patience_s <= 0:
                raise ranks[min(running)].failure("was still running at the time limit", 124)
            # Pipes before ends, so that a rank's last words are read before it is judged.
            events = sorted(selector.select(patience_s), key=lambda event: event[0].data[1] == "ended")
            for key, _ in events:
                rank, name = key.data
                if name == "ended":
                    selector.unregister(key.fileobj)
                    running.discard(rank.number)
                    _judge(rank, streams)
                elif not rank.read(name, streams[name]):
                    selector.unregister(key.fileobj)


def _judge(rank: Rank, streams: Mapping[str, TextIO | None]) -> None:
    """Read what a rank that has ended still had to say, and raise if it failed."""
    for name, echo in streams.items():
        # A process that it left behind may hold the pipe open: then there is no end to wait for.
        os.set_blocking(rank.pipe(name).fileno(), False)
        with contextlib.suppress(BlockingIOError):
            while rank.read(name, echo):
                pass
    code = rank.process.wait()
    if code < 0:
        raise rank.failure(f"was ended by {signal.Signals(-code).name}", 128 - code)
    if code > 0:
        raise rank.failure(f"failed with exit code {code}", code)


def _end(ranks: list[Rank]) -> None:
    """End the process groups of all ranks, also those whose leader has ended."""
    for rank in ranks:
        rank.signal(signal.SIGTERM)
    give_up_s = time.monotonic() + GRACE_S
    for rank in ranks:
        with contextlib.suppress(subprocess.TimeoutExpired):
            rank.process.wait(max(0.0, give_up_s - time.monotonic()))
    for rank in ranks:
        rank.signal(signal.SIGKILL)
        rank.process.wait()
        rank.close()


def _die_with_parent() -> None:
    """In the child: end when the one who runs the cluster is killed and can clean up nothing."""
    assert _LIBC is not None
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
