"""`hook_last`: hooks before a step of an optimizer that come after those of others; `hook_failed`: of one that fails.

Hooks of others are to see gradients as a user knows them. One that was registered since the last step comes after ours
in the next: ours are told so then, and stand behind it from the step after that on.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import wraps
from itertools import takewhile
from types import MethodType
from typing import Any, cast
from weakref import WeakKeyDictionary

from torch.optim import Optimizer

LastHook = Callable[[Optimizer, tuple[Any, ...], dict[str, Any], int], None]
"""Called with an optimizer, the arguments of its `step`, and how many hooks of others come after this one."""

_numbers: WeakKeyDictionary[Optimizer, list[int]] = WeakKeyDictionary()
"""Of our hooks of each optimizer, in their order."""


def hook_last(optimizer: Optimizer, hook: LastHook) -> None:
    """Have a hook called before each step of an optimizer, after all hooks but those that were given here later."""
    if optimizer not in _numbers:
        _numbers[optimizer] = []
        optimizer.register_step_post_hook(_put_last)

    def before(optimizer: Optimizer, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        behind = takewhile(lambda number: number != handle.id, reversed(optimizer._optimizer_step_pre_hooks))
        ours = _numbers[optimizer]
        hook(optimizer, arguments, keywords, sum(number not in ours for number in behind))

    handle = optimizer.register_step_pre_hook(before)
    _numbers[optimizer].append(handle.id)


def _put_last(optimizer: Optimizer, *_: object) -> None:
    hooks = cast("OrderedDict[int, Any]", optimizer._optimizer_step_pre_hooks)
    for number in _numbers[optimizer]:
        hooks.move_to_end(number)


def hook_failed(optimizer: Optimizer, undo: Callable[[], object]) -> None:
    """Have what hooks before a step did undone where the step ends in an error: torch's hooks after it do not run then.

    Who catches the error goes on with the optimizer as it was: zeroes gradients, takes their norm, saves its state.

    Example:
        >>> import torch
        >>> from contextlib import suppress
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
        >>> hook_failed(optimizer, lambda: print("undone"))
        >>> _ = optimizer.register_step_pre_hook(lambda *_: [].pop())
        >>> with suppress(IndexError):
        ...     optimizer.step()
        undone
    """
    step = optimizer.step

    @wraps(step)
    def stepped(_: Optimizer, *arguments: Any, **keywords: Any) -> Any:
        try:
            return step(*arguments, **keywords)
        except BaseException:  # an interrupt, too
            undo()
            raise

    optimizer.step = MethodType(stepped, optimizer)
