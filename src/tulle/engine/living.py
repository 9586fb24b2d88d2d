"""Which models live, alike on all ranks: one that was dropped, circles and all, is gone only when the collector comes.

A rank's collector comes when it likes, and a loop that told rows of a dropped model on some ranks would wait for the
others. To collect first takes a tenth of a second, more than some loops; to ask the other ranks takes milliseconds.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence

import torch.distributed as dist

from tulle.comm import gather_values, lane
from tulle.mesh import Axis

_LABEL = "models with split tables"
_homes: list[Axis] = []
"""Over whose ranks tables were ever split, in an order that all ranks have."""


def remember(home: Axis) -> None:
    """Tables are split over the ranks of an axis."""
    if home.size > 1 and all(other.group is not home.group for other in _homes):
        _homes.append(home)


def agree_on_living(numbers: Callable[[Axis], Sequence[int]]) -> None:
    """Collect what was dropped, if it is gone on some ranks and not on others. Every rank must call it.

    Args:
        numbers: Gives those of the models that live here, of an axis.
    """
    _homes[:] = [home for home in _homes if is_joined(home)]
    for home in _homes:
        heard = gather_values([*numbers(home)], lane(home, _LABEL), label=_LABEL)
        if any(other != heard[0] for other in heard):
            gc.collect()


def is_joined(axis: Axis) -> bool:
    """Whether its process group is there: something may hold a model longer than that, a compiler's cache say."""
    try:
        return axis.size == 1 or bool(dist.get_backend(axis.group))
    except ValueError:
        return False
