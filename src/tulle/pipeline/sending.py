"""`waits_for_others`: collectives of the user's own in a step, for which a rank would wait alone."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, cast

import torch.distributed as dist

_FUNCTIONAL = "torch._ops._c10d_functional"
_MODULES = ("torch.distributed.distributed_c10d", "torch.distributed.nn.functional", _FUNCTIONAL)
_OF_PAIRS = ("send", "recv", "isend", "irecv")


def is_collective(function: Callable[..., Any]) -> bool:
    """Whether a function is a collective of `torch.distributed`, one with gradients or a functional one."""
    return _module_of(function).startswith(_MODULES) and getattr(function, "__name__", "") not in _OF_PAIRS


def waits_for_others(
    function: Callable[..., Any], args: Collection[Any], kwargs: Mapping[str, Any], ranks: Collection[int]
) -> bool:
    """Whether a function of torch is a collective in which several ranks of an axis take part.

    Args:
        function: It.
        args: Its arguments, and
        kwargs: those by name.
        ranks: Of the axis, of which one alone runs what a stage does.
    """
    if not is_collective(function):
        return False
    groups = cast("dict[Any, str]", dist.distributed_c10d._world.pg_names)  # functional ones are always given its name
    given = [one for one in (*args, *kwargs.values()) if isinstance(one, str | dist.ProcessGroup)]
    group = next((group for group, name in groups.items() if group in given or name in given), None)
    if group is None and _module_of(function).startswith(_FUNCTIONAL):
        return False  # it waits for, or wraps, what one of them gave
    return len(set(dist.get_process_group_ranks(group)).intersection(ranks)) > 1


def _module_of(function: Callable[..., Any]) -> str:
    return getattr(function, "__module__", None) or ""
