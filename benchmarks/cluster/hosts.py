"""Starts and removes hosts: network namespaces, each with one link to a bridge that is held to a rate both ways.

    host 0: eth0 ═══ tl4711x0h0 ┐
    host 1: eth0 ═══ tl4711x0h1 ┼ tl4711x0br           ═══ is a veth pair
    host 2: eth0 ═══ tl4711x0h2 ┘

`tc tbf` holds what leaves an interface, so each link has two: at `eth0` for what the host sends, at the bridge's end
for what it receives. The bridge has no address: hosts reach each other and nothing else.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from addresses import MOST_HOSTS, Addresses, Subnet, bits_per_s, free_subnet, pid_of, tag, tag_of

LOCK = "/run/lock/tulle-cluster"
ETC = Path("/etc/netns")  # `ip netns exec NAME` lays the files of ETC/NAME over those of /etc
BURST_BYTES = 256 * 1024  # four of the largest packets that the kernel hands down whole
QUEUE_MS = 100  # what waits longer is dropped, and TCP slows down
KILL_S = 5.0


class ClusterError(RuntimeError):
    """The emulated cluster cannot start, or what ran on it failed."""


def require_system() -> None:
    """Raise if this machine or this user cannot make network namespaces, with what to do about it."""
    if sys.platform != "linux":
        raise ClusterError(f"network namespaces are Linux's; this is {sys.platform}: use a Linux machine or container")
    missing = [program for program in ("ip", "tc") if shutil.which(program) is None]
    if missing:
        raise ClusterError(f"{' and '.join(missing)} not found: install iproute2 (apt-get install iproute2)")
    if os.geteuid() != 0:
        raise ClusterError(
            "network namespaces need root: run with sudo, or in a container started with "
            "--cap-add=NET_ADMIN --cap-add=SYS_ADMIN"
        )


def start(hosts: int, rate: str, number: int) -> Addresses:
    """Start this process's cluster `number`: so many hosts, each link held to `rate`. Removes dead runs' first."""
    if not 1 <= hosts <= MOST_HOSTS:
        raise ClusterError(f"a cluster has 1 to {MOST_HOSTS} hosts; {hosts} were asked for")
    with _one_at_a_time():
        remove_leftovers()
        addresses = Addresses(tag(os.getpid(), number), hosts, free_subnet(_taken_subnets(), os.getpid()))
        try:
            # The alias is where other clusters read which subnet is taken.
            run("ip", "link", "add", addresses.bridge, "type", "bridge")
            run("ip", "link", "set", addresses.bridge, "alias", str(addresses.subnet), "up")
            for host in range(hosts):
                _start_host(addresses, host, rate)
        except BaseException:
            remove(addresses.tag)
            raise
    return addresses


def _start_host(addresses: Addresses, number: int, rate: str) -> None:
    name = addresses.host(number)
    run("ip", "netns", "add", name)
    (ETC / name).mkdir(parents=True)
    (ETC / name / "hosts").write_text(hosts_file(addresses, number))
    run("ip", "link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name)
    run("ip", "link", "set", name, "master", addresses.bridge, "up")
    run("ip", "-n", name, "link", "set", "lo", "up")
    run("ip", "-n", name, "address", "add", f"{addresses.address(number)}/{addresses.subnet.prefixlen}", "dev", "eth0")
    run("ip", "-n", name, "link", "set", "eth0", "up")
    if bits_per_s(rate) < float("inf"):
        limit = ["root", "tbf", "rate", rate, "burst", str(BURST_BYTES), "latency", f"{QUEUE_MS}ms"]
        run("tc", "-n", name, "qdisc", "add", "dev", "eth0", *limit)
        run("tc", "qdisc", "add", "dev", name, *limit)


def hosts_file(addresses: Addresses, number: int) -> str:
    """What `/etc/hosts` says on host `number`: its own name is that of its link, as libraries ask for it by name."""
    names = [f"{addresses.address(host)} host{host}" for host in range(addresses.hosts)]
    return "\n".join(["127.0.0.1 localhost", f"{addresses.address(number)} {socket.gethostname()}", *names]) + "\n"


def remove(cluster: str) -> None:
    """Remove all that carries the tag `cluster`: processes, links, namespaces. A second Ctrl-C has to wait."""
    with _signals_held():
        namespaces = [name for name in _namespaces() if tag_of(name) == cluster]
        for name in namespaces:
            _kill_processes(name)
        # A namespace takes its links along, but some time after it is gone: so the links go first.
        for link in _links():
            if tag_of(link["ifname"]) == cluster:
                run("ip", "link", "delete", link["ifname"])
        for name in namespaces:
            run("ip", "netns", "delete", name)
        for name in _folders():
            if tag_of(name) == cluster:
                shutil.rmtree(ETC / name)


def remove_leftovers() -> set[str]:
    """Remove the clusters of processes that are no more, and return their tags."""
    names = [*_folders(), *_namespaces(), *(link["ifname"] for link in _links())]
    dead = {name for name in names if (pid := pid_of(name)) is not None and not os.path.exists(f"/proc/{pid}")}
    tags = {found for name in dead if (found := tag_of(name)) is not None}
    for cluster in tags:
        remove(cluster)
    return tags


def inside(namespace: str, command: list[str]) -> list[str]:
    """The command that runs `command` in a namespace, in place of itself: the process that starts is the one."""
    return ["ip", "netns", "exec", namespace, *command]


def run(*command: str) -> str:
    """Run one command of the system and return what it prints."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ClusterError(f"{' '.join(command)}: {done.stderr.strip() or f'exit code {done.returncode}'}")
    return done.stdout


def _kill_processes(namespace: str) -> None:
    """Kill what still runs in a namespace, such as the daemons that a rank left behind."""
    give_up_s = time.monotonic() + KILL_S
    while (pids := run("ip", "netns", "pids", namespace).split()) and time.monotonic() < give_up_s:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.01)


def _namespaces() -> list[str]:
    return [entry["name"] for entry in json.loads(run("ip", "-json", "netns", "list") or "[]")]


def _links() -> list[dict[str, str]]:
    return json.loads(run("ip", "-json", "link", "show") or "[]")


def _folders() -> list[str]:
    return [path.name for path in ETC.iterdir()] if ETC.exists() else []


def _taken_subnets() -> list[Subnet]:
    """Where this machine has routes to, and what other clusters took."""
    routes = [route["dst"] for route in json.loads(run("ip", "-4", "-json", "route", "show", "table", "all") or "[]")]
    aliases = [link["ifalias"] for link in _links() if tag_of(link["ifname"]) and "ifalias" in link]
    return [ipaddress.IPv4Network(subnet, strict=False) for subnet in routes + aliases if subnet[0].isdigit()]


@contextlib.contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Let no other process choose a subnet, or take a half-started cluster for a dead one, meanwhile."""
    with open(LOCK, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _signals_held() -> Iterator[None]:
    """Let the signals that end a program wait."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
