"""Which models live, alike on all ranks: one that was dropped, circles and all, is gone only when the collector comes.

A rank's collector comes when it likes, and a loop that told rows of a dropped model on some ranks would wait for the
others. To collect first takes a tenth of a second, more than some loops; to ask the other ranks takes milliseconds.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Sequence
from itertools import count
from typing import Protocol
from weakref import WeakKeyDictionary

import torch.distributed as dist

from tulle.comm import gather_values, lane
from tulle.engine.ties import Engine
from tulle.mesh import Axis, axis_of

_LABEL = "models with split tables"
_homes: WeakKeyDictionary[dist.ProcessGroup, str] = WeakKeyDictionary()
"""Over whose ranks tables were ever split, in an order that all ranks have, and the name of their axis."""
_lanes: WeakKeyDictionary[dist.ProcessGroup, Axis] = WeakKeyDictionary()
"""On what the ranks of each ask each other. It holds no home: the sockets of one that was destroyed close."""


class Numbered(Engine, Protocol):
    """What keeps the parameters of one model in step, and the number that all ranks know it by."""

    number: int


def free_number(axis: Axis, living: Collection[Numbered]) -> int:
    """The smallest number that no living model has on any rank. Every rank of the axis must call it.

    Args:
        axis: Of which the numbers are.
        living: All that live here, over whatever ranks; what is dropped goes from it by itself.
    """
    if any(one.home.group is axis.group for one in living):
        gc.collect()  # a model that was dropped, circles and all, would keep its number, and its memory, for long
    mine = {one.number for one in living if one.home.group is axis.group}
    taken = set().union(*gather_values(mine, axis, label="the model's number"))
    return next(number for number in count() if number not in taken)


def remember(home: Axis) -> None:
    """Tables are split over the ranks of an axis."""
    if home.size > 1:
        _homes.setdefault(home.group, home.name)


def agree_on_living(numbers: Callable[[dist.ProcessGroup], Sequence[int]]) -> dict[dist.ProcessGroup, set[int]]:
    """Numbers of the models that live on all ranks, by process group. Every rank must call it.

    What was dropped is collected if it is gone on some ranks and not on others; what one rank holds alone, as the best
    so far say, is none of them.

    Args:
        numbers: Gives those of the models that live here, of a process group.
    """
    agreed: dict[dist.ProcessGroup, set[int]] = {}
    for home, name in [(home, name) for home, name in _homes.items() if _is_there(home)]:
        if home not in _lanes:
            _lanes[home] = lane(axis_of(home, name=name), _LABEL)
        heard = gather_values([*numbers(home)], _lanes[home], label=_LABEL)
        if any(other != heard[0] for other in heard):
            gc.collect()
            heard = gather_values([*numbers(home)], _lanes[home], label=_LABEL)
        agreed[home] = set[int].intersection(*map(set, heard))
    return agreed


def is_joined(home: Axis) -> bool:
    """Whether its process group is there: something may hold a model longer than that, a compiler's cache say."""
    return home.size == 1 or _is_there(home.group)


def _is_there(group: dist.ProcessGroup) -> bool:
    try:
        return bool(dist.get_backend(group))
    except ValueError:
        return False
