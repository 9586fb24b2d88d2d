"""Quantities as people write them on a command line, `100Gbit`, `12.5GB/s`, `2us`, and options that take them."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from tulle.cli.usage import UsageError
from tulle.entries import finite
from tulle.simulate import Change
from tulle.workload import Cluster

Hosts = Annotated[int | None, typer.Option(metavar="N", min=1, help="Default: as profiled.")]
ProcessesPerHost = Annotated[int | None, typer.Option(metavar="N", min=1, help="Default: as profiled.")]
Bandwidth = Annotated[
    str | None, typer.Option("--bandwidth", metavar="RATE", help="Of a host's link: 100Gbit, 12.5GB/s.")
]
Latency = Annotated[str | None, typer.Option(metavar="TIME", help="Of one message between hosts: 2us.")]
Lookahead = Annotated[
    bool | None,
    typer.Option(
        "--lookahead/--no-lookahead",
        metavar="",
        help="Whether the loop goes through tulle.lookahead. Default: as profiled.",
    ),
]

_PREFIXES = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_BYTES = {"bit": 1 / 8, "bps": 1 / 8, "B": 1.0, "Byte": 1.0, "byte": 1.0}
_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0}
NUMBER = r"([0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?)\s*"
"""A number, then perhaps blanks; what it stands for may still be nothing, or endless."""


def bandwidth(text: str, option: str = "--bandwidth") -> float:
    """Bytes per second.

    Raises:
        UsageError: If there is no unit, or it is not one of a bandwidth.

    Example:
        >>> bandwidth("100Gbit"), bandwidth("25 Gbps"), bandwidth("1.5GB/s")
        (12500000000.0, 3125000000.0, 1500000000.0)
    """
    found = re.fullmatch(NUMBER + r"([kKMGT]?)(bit|bps|B|[Bb]yte)(?:/s)?", text.strip())
    if not found or not finite(float(found[1])):
        raise UsageError(
            f"{option} {text!r} is no bandwidth, expected a number with its unit: 100Gbit, 25Gbps, 12.5GB/s"
        )
    return float(found[1]) * _PREFIXES[found[2]] * _BYTES[found[3]]


def duration(text: str, option: str = "--latency") -> float:
    """Seconds.

    Raises:
        UsageError: If there is no unit, or it is not one of a time.

    Example:
        >>> duration("2us"), duration("0.5 ms")
        (2e-06, 0.0005)
    """
    found = re.fullmatch(NUMBER + r"(ns|us|µs|μs|ms|s)", text.strip())
    if not found or not finite(float(found[1])):
        raise UsageError(f"{option} {text!r} is no time, expected a number with its unit: 2us, 0.5ms, 500ns")
    return float(found[1]) * _SECONDS[found[2]]


def changed(
    hosts: int | None, processes_per_host: int | None, rate: str | None, latency: str | None, inside: str | None = None
) -> Change:
    """How a cluster differs from the one that was profiled, from the options that say so.

    Raises:
        UsageError: If one is no quantity.

    Example:
        >>> changed(8, None, "10Gbit", None) == Change(hosts=8, bandwidth_bytes_per_s=1.25e9)
        True
    """
    return Change(
        hosts=hosts,
        processes_per_host=processes_per_host,
        bandwidth_bytes_per_s=None if rate is None else bandwidth(rate),
        latency_s=None if latency is None else duration(latency),
        inside_bandwidth_bytes_per_s=None if inside is None else bandwidth(inside, "--inside-bandwidth"),
    )


def tell_of_unknown_links(measured: Cluster, changes: Sequence[Change]) -> None:
    """Say on stderr that links between hosts are guessed: one host that was profiled alone knows of none."""
    is_guessed = any((change.hosts or 1) > 1 and change.bandwidth_bytes_per_s is None for change in changes)
    if measured.hosts == 1 and is_guessed:
        print(
            "tulle: the profile is of one host, which knows no link to others: they are taken to be as those among its "
            "processes. Give --bandwidth and --latency",
            file=sys.stderr,
        )


def whole(text: str, option: str) -> int:
    """A number of things, 1 or more.

    Raises:
        UsageError: If it is not one.
    """
    if not re.fullmatch(r"\d+", text.strip()) or int(text) < 1:
        raise UsageError(f"{option} {text!r} is no number of things, expected 1 or more")
    return int(text)


def share_and_factor(text: str, option: str) -> tuple[float, float]:
    """A share of something and a factor for it.

    Raises:
        UsageError: If it is not such a pair.

    Example:
        >>> share_and_factor("0.01:1.5", "--stragglers")
        (0.01, 1.5)
    """
    found = re.fullmatch(NUMBER + ":" + NUMBER, text.strip())
    if not found or float(found[1]) > 1 or not finite(float(found[2])):
        raise UsageError(f"{option} {text!r}: expected SHARE:FACTOR, 0.01:1.5 say: 1% take 1.5 times as long")
    return float(found[1]), float(found[2])
