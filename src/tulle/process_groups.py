"""`new_group`: a process group that its members alone make, whatever groups each of them has made with others."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from tulle.errors import CommunicationError

GONE = (
    "the mesh's process groups are gone, since torch.distributed.destroy_process_group() was called: call that last, "
    "or go on with a mesh that tulle.init makes anew on every rank, and a model that is distributed on it"
)
_naming = threading.local()
_made: WeakKeyDictionary[dist.ProcessGroup, Counter[str]] = WeakKeyDictionary()
"""By the process group of all ranks, how many groups of some ranks, for some purpose, this one has made."""


def new_group(ranks: Sequence[int], timeout_s: float, *, purpose: str, backend: str | None = None) -> dist.ProcessGroup:
    """A process group over some ranks. These alone must call it, those of one purpose in one order.

    Members find each other by the group's name, which torch makes of its ranks and of how many groups this process is
    in: another number on each, where some have made one without the others. Here it is made of ranks and purpose. Where
    the process group of all ranks is bound to a device, as nccl's may be, torch splits new ones off it, in which all
    ranks must take part: not here.

    Args:
        ranks: Its members, ascending, this one among them.
        timeout_s: Of its collectives.
        purpose: For what it is.
        backend: As of `torch.distributed.new_group`.

    Raises:
        CommunicationError: If the processes have been joined no more.
    """
    world = dist.group.WORLD
    if world is None:
        raise CommunicationError(GONE)
    members = f"tulle {purpose} {list(ranks)}"
    made = _made.setdefault(world, Counter())
    made[members] += 1
    bound, world.bound_device_id = world.bound_device_id, None
    try:
        with _named(f"{members} {made[members]}"):
            group = dist.new_group(
                list(ranks), timeout=timedelta(seconds=timeout_s), backend=backend, use_local_synchronization=True
            )
    finally:
        world.bound_device_id = bound
    assert isinstance(group, dist.ProcessGroup), "this rank is one of its members"
    return group


def is_gone(group: dist.ProcessGroup) -> bool:
    """Whether a process group has been destroyed."""
    return group not in dist.distributed_c10d._world.pg_map


def backend_of(group: dist.ProcessGroup, device_type: str) -> str:
    """What does a group's collectives on tensors of a type of device: "gloo", "nccl" or another.

    Torch says "undefined" of a group that was made without naming one, or with one for each type of device.

    Raises:
        CommunicationError: If it has been destroyed.
    """
    try:
        name = dist.get_backend(group)
    except ValueError as error:
        raise CommunicationError(GONE) from error
    if name != dist.Backend.UNDEFINED and ":" not in name:
        return name
    by_device = dict(one.split(":") for one in dist.get_backend_config(group).split(","))
    return by_device.get(device_type, name)


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Have the group that this thread makes be called so."""
    torchs: Any = dist.distributed_c10d
    if not isinstance(torchs._process_group_name, _Names):
        torchs._process_group_name = _Names(torchs._process_group_name)
    _naming.name = name
    try:
        yield
    finally:
        del _naming.name


class _Names:
    """Torch's own names for groups, but for those that are made here."""

    def __init__(self, torchs: Callable[..., str]) -> None:
        self._torchs = torchs

    def __call__(self, *arguments: Any, **keywords: Any) -> str:
        """A group's name."""
        return getattr(_naming, "name", None) or self._torchs(*arguments, **keywords)
