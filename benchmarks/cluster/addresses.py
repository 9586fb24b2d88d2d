"""What a cluster's parts are called and where they are reached: pure values, so that two clusters never meet.

Names start with `tl`, the process id of the one who runs the cluster, and a number: `tl4711x0h3` is host 3 of the first
cluster of process 4711. So anyone can see whose it is, and whether that one is still alive. A network interface's name
has at most 15 characters, which holds 100 hosts and the largest process id.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass

Subnet = ipaddress.IPv4Network

MOST_HOSTS = 100
SUBNETS = tuple(ipaddress.IPv4Network("10.99.0.0/16").subnets(new_prefix=24))
_NAME = re.compile(r"(?P<tag>tl(?P<pid>\d+)x\d+)(h\d+|br)")
_RATE = re.compile(r"(?P<number>\d+(\.\d+)?)(?P<unit>[kmg])bit")
_BITS = {"k": 1e3, "m": 1e6, "g": 1e9}


@dataclass(frozen=True, slots=True)
class Addresses:
    """The names and addresses of a cluster's hosts and of the bridge that joins them."""

    tag: str
    hosts: int
    subnet: Subnet

    @property
    def bridge(self) -> str:
        """The bridge's name."""
        return f"{self.tag}br"

    def host(self, number: int) -> str:
        """The name of host `number`'s namespace, and of the bridge's end of its link."""
        return f"{self.tag}h{number}"

    def address(self, number: int) -> str:
        """Host `number`'s address on the bridge."""
        return str(self.subnet[number + 1])


def tag(pid: int, number: int) -> str:
    """What the names of process `pid`'s cluster `number` start with."""
    return f"tl{pid}x{number}"


def tag_of(name: str) -> str | None:
    """The tag in the name of a namespace, link or bridge; None if it is not a cluster's."""
    match = _NAME.fullmatch(name)
    return match["tag"] if match else None


def pid_of(name: str) -> int | None:
    """The process that runs the cluster which a name belongs to; None if it is not a cluster's."""
    match = _NAME.fullmatch(name)
    return int(match["pid"]) if match else None


def free_subnet(taken: Iterable[Subnet], first: int = 0) -> Subnet:
    """The first of `SUBNETS`, from number `first` on and around, that overlaps none that is taken."""
    taken = list(taken)
    for offset in range(len(SUBNETS)):
        subnet = SUBNETS[(first + offset) % len(SUBNETS)]
        if not any(subnet.overlaps(other) for other in taken):
            return subnet
    raise ValueError("all of 10.99.0.0/16 is taken by routes of this machine or by other clusters")


def bits_per_s(rate: str) -> float:
    """The number in a rate as `tc` writes it, such as `1gbit` or `250mbit`; infinite for `none`."""
    if rate == "none":
        return float("inf")
    match = _RATE.fullmatch(rate)
    if match is None or float(match["number"]) == 0:
        raise ValueError(f"a rate is a number with kbit, mbit or gbit, or none, such as 1gbit; this is {rate!r}")
    return float(match["number"]) * _BITS[match["unit"]]
