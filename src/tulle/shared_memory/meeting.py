"""`works_of`: exchanges among the ranks of a process group, where they share a host's memory."""

from __future__ import annotations

import atexit
import socket
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from tulle.board import is_failing
from tulle.process_groups import backend_of
from tulle.shared_memory.channel import Channel
from tulle.shared_memory.messages import Connection
from tulle.shared_memory.neighbours import Neighbours
from tulle.shared_memory.one_way import Receiver, Sender
from tulle.shared_memory.works import Works

_met: weakref.WeakKeyDictionary[dist.ProcessGroup, Neighbours] = weakref.WeakKeyDictionary()
"""By the process group of all ranks."""
_works: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], Works | None]] = weakref.WeakKeyDictionary()
_one_way: weakref.WeakKeyDictionary[dist.ProcessGroup, list[Sender | Receiver]] = weakref.WeakKeyDictionary()


def meet(gather: Callable[[Any], Sequence[Any]]) -> None:
    """Find out who shares memory with whom. Every rank must call it, once its process group is there.

    Args:
        gather: Gives the values of all ranks.
    """
    world = dist.group.WORLD
    assert world is not None, "joined before"
    if world in _met or dist.get_world_size() == 1:
        return
    _met[world] = neighbours = Neighbours.listening()
    neighbours.know(gather(neighbours.reach(gather(neighbours.address))))
    atexit.unregister(_close_all)
    atexit.register(_close_all)  # runs before what ends the process groups, which was registered earlier


def works_of(group: dist.ProcessGroup, ranks: Sequence[int], timeout_s: float) -> Works | None:
    """Exchanges among some ranks of a group, this one among them; None if they do not all share memory.

    Costs no communication: they connect with the first exchange.
    """
    made = _works.setdefault(group, {})
    key = tuple(ranks)
    if key not in made:
        neighbours = _neighbours()
        is_shared = neighbours is not None and neighbours.can_share(key) and backend_of(group, "cpu") == "gloo"
        made[key] = Works(_channel(neighbours, group, key, timeout_s)) if neighbours is not None and is_shared else None
    return made[key]


def do_share(ranks: Sequence[int]) -> bool:
    """Whether some ranks, by their numbers among all, share memory with each other: the same on all ranks there are."""
    neighbours = _neighbours()
    return neighbours is not None and neighbours.can_share(ranks)


def one_way(group: dist.ProcessGroup, ranks: Sequence[int], timeout_s: float) -> dict[int, tuple[Sender, Receiver]]:
    """To and from each of some ranks of a group with which this one shares memory, by its number among all.

    All of them must call it. Costs no communication but that of a host.

    Args:
        group: Theirs, and nobody has called this for it.
        ranks: Of the group, this one among them.
        timeout_s: How long to wait for another.

    Raises:
        OSError: If one has gone, or does not come in time.
    """
    neighbours, own = _neighbours(), dist.get_rank()
    others = [rank for rank in ranks if rank != own and neighbours is not None and neighbours.can_share((own, rank))]
    if neighbours is None or not others:
        return {}
    made: dict[tuple[int, int], socket.socket] = {}
    for other in sorted(others, reverse=True):  # to larger numbers first, as that waits for nobody
        for way in ((own, other), (other, own)):
            key = f"{group.group_name} {way}"
            made[way] = neighbours.connect(other, key) if own < other else neighbours.accept(key, timeout_s)
    found = {
        other: (
            Sender(Connection(other, made[own, other], timeout_s), timeout_s),
            Receiver(Connection(other, made[other, own], 0.0)),
        )
        for other in others
    }
    _one_way[group] = [end for ends in found.values() for end in ends]
    return found


def _close_all() -> None:
    """Fail all exchanges that wait for another rank: a thread that wakes when the interpreter ends aborts it."""
    for works in [one for made in [*_works.values()] for one in made.values()]:
        if works is not None:
            works.close()
    for end in [end for ends in [*_one_way.values()] for end in ends]:
        if isinstance(end, Sender) and not is_failing():
            end.settle()
        end.close()


def _neighbours() -> Neighbours | None:
    world = dist.group.WORLD
    return None if world is None else _met.get(world)


def _channel(neighbours: Neighbours, group: dist.ProcessGroup, ranks: tuple[int, ...], timeout_s: float) -> Channel:
    name = f"{group.group_name} {list(ranks)}"
    own = dist.get_rank()

    def connect() -> dict[int, Connection]:
        made = {rank: neighbours.connect(rank, f"{name} {own}") for rank in ranks if rank > own}
        made |= {rank: neighbours.accept(f"{name} {rank}", timeout_s) for rank in ranks if rank < own}
        return {ranks.index(rank): Connection(rank, one, timeout_s) for rank, one in made.items()}

    return Channel(ranks.index(own), len(ranks), connect)
