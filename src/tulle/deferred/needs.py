"""`needed_calls`: what some memories depend on; `draw_in_vain`: of what they do not, the random numbers alone."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.utils._pytree import tree_map

from tulle.deferred.by_rows import drawn_by
from tulle.deferred.record import Call, Record, View

_OVERWRITING = (
    *("normal_", "uniform_", "random_", "exponential_", "cauchy_", "log_normal_", "geometric_", "bernoulli_"),
    "_no_grad_trunc_normal_",
)
"""How many numbers these draw does not depend on what is in the memory that they fill."""


def needed_calls(record: Record, memories: Iterable[int], *, has_all_draws: bool) -> set[int]:
    """Numbers of the calls that must be done for real.

    Args:
        record: Whose calls.
        memories: Numbers of those whose values are wanted.
        has_all_draws: Whether all other random numbers are to be drawn, too: of them, those calls are needed for which
            memory without values would not do, since how many they draw may depend on what is in it.
    """
    wanted, needed = set(memories), set()
    for number, call in reversed(list(enumerate(record.calls))):
        is_drawn = has_all_draws and call.is_random and not _is_drawn_in_vain(call)
        if is_drawn or (call.made | call.changed) & wanted:
            needed.add(number)
            wanted |= call.touched
    return needed


def draw_in_vain(call: Call, chunk_bytes: int) -> None:
    """Draw the random numbers of a call, and let go of them: a chunk at a time where that can be done."""
    draw = drawn_by(call)
    if draw is not None:
        for _ in draw.chunks(chunk_bytes):
            pass
        return
    arguments, keywords = tree_map(_without_values, (call.arguments, call.keywords))
    call.function(*arguments, **keywords)


def _is_drawn_in_vain(call: Call) -> bool:
    views = call.views
    is_filled = len(views) == 1 and call.changed == {views[0].memory} and views[0] is call.arguments[0]
    return not views or (is_filled and call.name in _OVERWRITING)


def _without_values(value: object) -> object:
    if isinstance(value, View):
        return torch.empty_strided(value.shape, value.stride, dtype=value.dtype)
    return value
