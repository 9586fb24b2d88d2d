"""`hook_last`: hooks before a step of an optimizer that come after those of others; `hook_failed`: of one that fails.

Hooks of others are to see parameters and gradients as a user knows them, whenever they were registered: ours are put
behind them when a step begins.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import wraps
from types import MethodType
from typing import Any, cast
from weakref import WeakKeyDictionary

from torch.optim import Optimizer

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Of `step`, the optimizer first."""
LastHook = Callable[[Optimizer, tuple[Any, ...], dict[str, Any]], Arguments | None]
"""Called with an optimizer and the arguments of its `step`, the optimizer among them; gives others, or None."""

_numbers: WeakKeyDictionary[Optimizer, list[int]] = WeakKeyDictionary()
"""Of our hooks of each optimizer, in their order."""


def hook_last(optimizer: Optimizer, hook: LastHook) -> None:
    """Have a hook called before each step of an optimizer, after all hooks but those that were given here later."""
    if optimizer not in _numbers:
        _numbers[optimizer] = []
        step = optimizer.step

        @wraps(_function_of(step))
        def stepped(optimizer: Optimizer, *arguments: Any, **keywords: Any) -> Any:
            hooks = cast("OrderedDict[int, Any]", optimizer._optimizer_step_pre_hooks)
            for number in _numbers[optimizer]:
                hooks.move_to_end(number)
            return step(*arguments, **keywords)

        optimizer.step = MethodType(stepped, optimizer)
    _numbers[optimizer].append(optimizer.register_step_pre_hook(hook).id)


def hook_first_after(optimizer: Optimizer, hook: Callable[..., object]) -> None:
    """Have a hook called after each step of an optimizer, before those that are there."""
    handle = optimizer.register_step_post_hook(cast("Any", hook))
    cast("OrderedDict[int, Any]", optimizer._optimizer_step_post_hooks).move_to_end(handle.id, last=False)


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

    @wraps(_function_of(step))
    def stepped(_: Optimizer, *arguments: Any, **keywords: Any) -> Any:
        try:
            return step(*arguments, **keywords)
        except BaseException:  # an interrupt, too
            undo()
            raise

    optimizer.step = MethodType(stepped, optimizer)


def _function_of(step: Callable[..., Any]) -> Callable[..., Any]:
    """The function of a method: what stands in its place is bound again, and `GradScaler` asks for its signature."""
    return getattr(step, "__func__", step)
