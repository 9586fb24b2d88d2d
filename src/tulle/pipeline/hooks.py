"""Forward hooks of placed modules: the user's run between modules, on every rank, so that what they remember is there.

Hooks of torch and of this library stay with the module, on its owner. So do all of a module that has hooks before its
forward too, which may change what the others are given.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

Hook = Callable[..., Any]


def hooks_for_all(module: nn.Module) -> dict[int, Hook]:
    """Those that run between modules, by torch's numbers for them."""
    if not module._forward_hooks or module._forward_pre_hooks:
        return {}
    return {number: hook for number, hook in module._forward_hooks.items() if not _stays(hook)}


def without(hooks: Mapping[int, Hook], module: nn.Module) -> Callable[..., Any]:
    """The module's own call, with all hooks but these."""

    def call(*args: Any, **kwargs: Any) -> Any:
        every = module._forward_hooks
        module._forward_hooks = OrderedDict((number, hook) for number, hook in every.items() if number not in hooks)
        try:
            return module._call_impl(*args, **kwargs)
        finally:
            module._forward_hooks = every

    return call if hooks else module._call_impl


def changed_by(
    hooks: Mapping[int, Hook], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
) -> Any:
    """What a call gives after these hooks have seen it."""
    for number, hook in hooks.items():
        given = (args, kwargs) if number in module._forward_hooks_with_kwargs else (args,)
        changed = hook(module, *given, result)
        result = result if changed is None else changed
    return result


def _stays(hook: Hook) -> bool:
    made_in = getattr(getattr(hook, "func", hook), "__module__", None) or ""
    return made_in.partition(".")[0] in ("torch", "tulle")
