"""What a link really carries: one TCP connection between two hosts, plain sockets, the receiver counts."""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
import time
from dataclasses import asdict, dataclass

from addresses import Addresses
from hosts import inside

WARM_UP_S = 0.3  # what the burst allowance and TCP's slow start distort
CHUNK_BYTES = 1 << 20
TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True)
class Rate:
    """Payload between two hosts, in bits per second: each way alone, and each way while both send."""

    forward_bits_per_s: float
    backward_bits_per_s: float
    forward_of_both_bits_per_s: float
    backward_of_both_bits_per_s: float

    def as_dict(self) -> dict[str, float]:
        """For JSON."""
        return asdict(self)

    def __str__(self) -> str:
        forward, backward, *both = (f"{value / 1e6:.0f}" for value in asdict(self).values())
        return f"{forward} Mbit/s there, {backward} back, {both[0]} and {both[1]} at once"


def measure(addresses: Addresses, first: int, second: int, duration_s: float) -> Rate:
    """Measure between hosts `first` and `second`, each measurement over `duration_s`."""
    (forward,) = _transfer(addresses, [(first, second)], duration_s)
    (backward,) = _transfer(addresses, [(second, first)], duration_s)
    return Rate(forward, backward, *_transfer(addresses, [(first, second), (second, first)], duration_s))


def _transfer(addresses: Addresses, pairs: list[tuple[int, int]], duration_s: float) -> list[float]:
    """Bits per second from the first to the second host of each pair, all pairs at once."""
    processes: list[subprocess.Popen[str]] = []
    try:
        receivers = [_start(processes, addresses, to, "receive", str(duration_s)) for _, to in pairs]
        ports = [_line(receiver) for receiver in receivers]
        for (sender, to), port in zip(pairs, ports, strict=True):
            _start(processes, addresses, sender, "send", addresses.address(to), port)
        return [json.loads(_line(receiver)) for receiver in receivers]
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def _start(processes: list[subprocess.Popen[str]], addresses: Addresses, host: int, *arguments: str):
    command = inside(addresses.host(host), [sys.executable, __file__, *arguments])
    processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
    return processes[-1]


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def receive(duration_s: float) -> None:
    """Print the port; take what comes; print bits per second over `duration_s`, after the warm-up."""
    with socket.create_server(("", 0)) as server:
        server.settimeout(TIMEOUT_S)
        print(server.getsockname()[1], flush=True)
        connection, _ = server.accept()
        with connection:
            connection.settimeout(TIMEOUT_S)
            _count(connection, WARM_UP_S)
            print(json.dumps(_count(connection, duration_s)), flush=True)


def _count(connection: socket.socket, duration_s: float) -> float:
    """Bits per second that arrive in the next `duration_s`."""
    buffer = bytearray(CHUNK_BYTES)
    received_bytes = 0
    begin_s = now_s = time.perf_counter()
    while now_s - begin_s < duration_s:
        received_bytes += connection.recv_into(buffer)
        now_s = time.perf_counter()
    return received_bytes * 8 / (now_s - begin_s)


def send(address: str, port: int) -> None:
    """Send until the receiver has enough."""
    chunk = bytes(CHUNK_BYTES)
    with socket.create_connection((address, port), TIMEOUT_S) as connection:
        try:
            while True:
                connection.sendall(chunk)
        except ConnectionError:
            return


def main() -> None:
    """Be one end of a measurement."""
    parser = argparse.ArgumentParser(description=__doc__)
    ends = parser.add_subparsers(dest="end", required=True)
    receiving = ends.add_parser("receive")
    receiving.add_argument("duration_s", type=float)
    sending = ends.add_parser("send")
    sending.add_argument("address")
    sending.add_argument("port", type=int)
    options = parser.parse_args()
    if options.end == "receive":
        receive(options.duration_s)
    else:
        send(options.address, options.port)


if __name__ == "__main__":
    main()
