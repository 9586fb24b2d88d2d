"""Finds this machine in a list of hosts."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable, Sequence

from tulle.cli.usage import UsageError


def parse_hosts(text: str) -> list[str]:
    """The hosts of a comma-separated list.

    Example:
        >>> parse_hosts("node1, node2")
        ['node1', 'node2']
    """
    hosts = [host.strip() for host in text.split(",")]
    if not all(hosts):
        raise UsageError(f"--hosts {text!r} has an empty name, expected a list such as --hosts node1,node2")
    return hosts


def is_this_host(host: str) -> bool:
    """Whether a name or address belongs to this machine."""
    own = socket.gethostname()
    if host in (own, own.split(".")[0], socket.getfqdn()):
        return True
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return any(_is_local(str(where[0])) for *_, where in found)


def _is_local(address: str) -> bool:
    family = socket.AF_INET6 if ipaddress.ip_address(address.split("%")[0]).version == 6 else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address, 0))  # the kernel binds to the addresses of this machine only
        except OSError:
            return False
    return True


def own_place(hosts: Sequence[str], *, is_own: Callable[[str], bool] = is_this_host) -> int:
    """This machine's place in `hosts`, from 0.

    Args:
        hosts: Names or addresses.
        is_own: Whether one of them is this machine.

    Raises:
        UsageError: If none of them, or more than one, is this machine.

    Example:
        >>> own_place(["node1", "node2"], is_own=lambda host: host == "node2")
        1
    """
    places = [place for place, host in enumerate(hosts) if is_own(host)]
    if len(places) == 1:
        return places[0]
    what = "more than one" if places else "none"
    raise UsageError(
        f"{what} of --hosts {','.join(hosts)} is this machine ({socket.gethostname()}): "
        f"say which it is with --node-rank, from 0 to {len(hosts) - 1}"
    )
