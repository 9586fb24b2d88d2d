"""Quantities as people write them on a command line: `100Gbit`, `12.5GB/s`, `2us`."""

from __future__ import annotations

import re

from tulle.cli.usage import UsageError

_PREFIXES = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_BYTES = {"bit": 1 / 8, "bps": 1 / 8, "B": 1.0, "Byte": 1.0, "byte": 1.0}
_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0}
_NUMBER = r"(\d+(?:\.\d*)?(?:[eE][+-]?\d+)?)\s*"


def bandwidth(text: str, option: str = "--bandwidth") -> float:
    """Bytes per second.

    Raises:
        UsageError: If there is no unit, or it is none of a bandwidth.

    Example:
        >>> bandwidth("100Gbit"), bandwidth("25 Gbps"), bandwidth("1.5GB/s")
        (12500000000.0, 3125000000.0, 1500000000.0)
    """
    found = re.fullmatch(_NUMBER + r"([kKMGT]?)(bit|bps|B|[Bb]yte)(?:/s)?", text.strip())
    if not found or not float(found[1]):
        raise UsageError(
            f"{option} {text!r} is no bandwidth, expected a number with its unit: 100Gbit, 25Gbps, 12.5GB/s"
        )
    return float(found[1]) * _PREFIXES[found[2]] * _BYTES[found[3]]


def duration(text: str, option: str = "--latency") -> float:
    """Seconds.

    Raises:
        UsageError: If there is no unit, or it is none of a time.

    Example:
        >>> duration("2us"), duration("0.5 ms")
        (2e-06, 0.0005)
    """
    found = re.fullmatch(_NUMBER + r"(ns|us|µs|μs|ms|s)", text.strip())
    if not found or not float(found[1]):
        raise UsageError(f"{option} {text!r} is no time, expected a number with its unit: 2us, 0.5ms, 500ns")
    return float(found[1]) * _SECONDS[found[2]]


def whole(text: str, option: str) -> int:
    """A number of things, 1 or more.

    Raises:
        UsageError: If it is none.
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
    found = re.fullmatch(_NUMBER + ":" + _NUMBER, text.strip())
    if not found or float(found[1]) > 1 or not float(found[2]):
        raise UsageError(f"{option} {text!r}: expected SHARE:FACTOR, 0.01:1.5 say: 1% take 1.5 times as long")
    return float(found[1]), float(found[2])
