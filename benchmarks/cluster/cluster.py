"""N hosts on one machine, joined by links of a given rate, as a context manager.

with Cluster(hosts=8, rate="1gbit") as cluster:
    print(cluster.measured_rate())
    cluster.run(["python", "train.py"], timeout_s=600)
"""

from __future__ import annotations

import itertools
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from types import FrameType, TracebackType

from addresses import Addresses, bits_per_s
from hosts import ClusterError, remove, require_system, start
from launch import RankError, in_namespace, rank_environment, run_ranks
from rate import Rate, measure

__all__ = ["Cluster", "ClusterError", "RankError", "Rate"]

FIRST_PORT = 29500
_numbers = itertools.count()


class Cluster:
    """Emulated hosts, up inside `with`, gone after it however it ends; SIGTERM and SIGHUP end it like Ctrl-C does."""

    def __init__(self, hosts: int, rate: str = "none", ranks_per_host: int = 1) -> None:
        """Plan so many hosts, with links of `rate` (such as `1gbit`; `none` for no limit) in each direction."""
        bits_per_s(rate)  # a mistake is told here, before anything is started
        if ranks_per_host < 1:
            raise ValueError(f"a host has at least 1 rank; {ranks_per_host} were asked for")
        self.hosts = hosts
        self.rate = rate
        self.ranks_per_host = ranks_per_host
        self._runs = 0
        self._addresses: Addresses | None = None
        self._handlers: dict[signal.Signals, object] = {}

    @property
    def addresses(self) -> Addresses:
        """Names and addresses, while the cluster is up."""
        if self._addresses is None:
            raise ClusterError("the cluster is not up: use it inside `with Cluster(...) as cluster`")
        return self._addresses

    def __enter__(self) -> Cluster:
        require_system()
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(number) is signal.SIG_DFL:
                    self._handlers[number] = signal.signal(number, _leave)
        try:
            self._addresses = start(self.hosts, self.rate, next(_numbers))
        except BaseException:
            self._restore_handlers()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            remove(self.addresses.tag)
            self._addresses = None
        finally:
            self._restore_handlers()

    def run(
        self,
        command: Sequence[str],
        *,
        timeout_s: float | None = None,
        env: Mapping[str, str] | None = None,
        echo: bool = False,
    ) -> list[str]:
        """Run `command` once per rank, on its host, and return what each rank printed to stdout.

        Each rank has this process's environment, torchrun's variables, and `env` on top. With `echo` its lines are
        shown as they come, behind its number. Raises `RankError` with the first failing rank's exit code and last
        lines, after all others were ended; at `timeout_s` likewise, with exit code 124.
        """
        addresses = self.addresses
        # A port of its own for each run: the last run's may still be closing.
        port = FIRST_PORT + self._runs % 1000
        self._runs += 1
        ranks = [
            in_namespace(
                addresses.host(rank // self.ranks_per_host),
                command,
                {**rank_environment(addresses, rank, self.ranks_per_host, port), **(env or {})},
            )
            for rank in range(self.hosts * self.ranks_per_host)
        ]
        return run_ranks(ranks, timeout_s=timeout_s, echo=echo)

    def measured_rate(self, first: int = 0, second: int = 1, duration_s: float = 1.0) -> Rate:
        """What TCP carries between two hosts now, each way alone and both at once; takes some 4 seconds."""
        if not 0 <= first != second >= 0 or max(first, second) >= self.hosts:
            raise ValueError(f"the rate is measured between two of {self.hosts} hosts, not {first} and {second}")
        return measure(self.addresses, first, second, duration_s)

    def _restore_handlers(self) -> None:
        for number in self._handlers:
            signal.signal(number, signal.SIG_DFL)
        self._handlers.clear()


def _leave(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)
