"""Hooks of placed modules' forward: the user's run between modules, on every rank, so that what they remember is there.

Hooks of torch and of this library stay with the module, on its owner, closest to its forward.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from tulle.errors import ModelError

Hook = Callable[..., Any]
Caller = Callable[..., Any]
Arguments = tuple[Any, ...]
Keywords = dict[str, Any]
Given = tuple[Arguments, Keywords]
_NO_HOOKS: dict[int, Hook] = {}
_OF_FORWARD = [name for name in vars(nn.Module()) if name.startswith(("_forward_hooks", "_forward_pre_hooks"))]
"""Attributes of modules that hold them, and what is noted of some."""


@dataclass(frozen=True, slots=True)
class Hooks:
    """Those of a module that run between modules, by torch's numbers for them.

    Args:
        module: Whose.
        before: Its forward.
        after: Its forward.
        run: The module's own call, compiled or not.
    """

    module: nn.Module
    before: Mapping[int, Hook]
    after: Mapping[int, Hook]
    run: Caller

    @property
    def caller(self) -> Callable[..., Any]:
        """The module's own call, with all hooks but these."""
        return self._call if self.before or self.after else self.run

    def given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What the module is called with, once these hooks have seen it."""
        for number, hook in self.before.items():
            if number in self.module._forward_pre_hooks_with_kwargs:
                args, kwargs = hook(self.module, args, kwargs) or (args, kwargs)
            elif (changed := hook(self.module, args)) is not None:
                args = changed if isinstance(changed, tuple) else (changed,)
        return args, kwargs

    def changed(self, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
        """What a call gives, once these hooks have seen it."""
        for number, hook in self.after.items():
            given = (args, kwargs) if number in self.module._forward_hooks_with_kwargs else (args,)
            changed = hook(self.module, *given, result)
            result = result if changed is None else changed
        return result

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        module, before, after = self.module, self.module._forward_pre_hooks, self.module._forward_hooks
        module._forward_pre_hooks = OrderedDict((n, hook) for n, hook in before.items() if n not in self.before)
        module._forward_hooks = OrderedDict((n, hook) for n, hook in after.items() if n not in self.after)
        try:
            return self.run(*args, **kwargs)
        finally:
            module._forward_pre_hooks, module._forward_hooks = before, after


def with_hooks(
    name: str, module: nn.Module, run: Caller, call: Callable[[Caller, Arguments, Keywords], Any], given: Given
) -> Any:
    """Call a placed module, with what hooks run between modules before and behind it. Every rank comes here.

    Args:
        name: The module's.
        module: It.
        run: Its own call, compiled or not.
        call: Is given what runs it, with all other hooks, and its arguments.
        given: The arguments, and those by name.
    """
    hooks = Hooks(module, _users(module._forward_pre_hooks), _users(module._forward_hooks), run)
    args, kwargs = hooks.given(*given)
    result = call(hooks.caller, args, kwargs)
    changed = hooks.changed(args, kwargs, result)
    if changed is not result and hears_gradients(module):
        raise ModelError(
            f"{name!r} has a forward hook that changes what it gives, and hooks of backward, which would see "
            "the gradient of what it gave before that: put either on a module around it"
        )
    return changed


@contextmanager
def as_before(model: nn.Module) -> Iterator[None]:
    """Forget, at the end, hooks that a forward has put on modules, as `transformers` does to collect hidden states."""
    kept = [vars(module)[name] for module in model.modules() for name in _OF_FORWARD]
    before = [dict(hooks) for hooks in kept]
    try:
        yield
    finally:
        for hooks, content in zip(kept, before, strict=True):
            hooks.clear()  # the same ones, or handles could not remove what is in them
            hooks.update(content)


@contextmanager
def users_aside(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Have the user's hooks of some modules not run."""
    hooked = [module for module in modules if is_hooked(module)]
    before = [(module, module._forward_pre_hooks, module._forward_hooks) for module in hooked]
    try:
        for module, *both in before:
            first, second = (OrderedDict((n, one) for n, one in hooks.items() if _stays(one)) for hooks in both)
            module._forward_pre_hooks, module._forward_hooks = first, second
        yield
    finally:
        for module, first, second in before:
            module._forward_pre_hooks, module._forward_hooks = first, second


def hears_gradients(module: nn.Module) -> bool:
    """Whether hooks of backward are there, which torch puts on what goes in and comes out: on one rank, then."""
    return bool(module._backward_hooks or module._backward_pre_hooks)


def is_hooked(module: nn.Module) -> bool:
    """Whether the user put hooks on a module's forward."""
    return bool(_users(module._forward_pre_hooks) or _users(module._forward_hooks))


def _users(hooks: Mapping[int, Hook]) -> Mapping[int, Hook]:
    return {number: hook for number, hook in hooks.items() if not _stays(hook)} if hooks else _NO_HOOKS


def _stays(hook: Hook) -> bool:
    function = getattr(hook, "func", hook)
    made_in = getattr(function, "__module__", None) or type(function).__module__
    return made_in.partition(".")[0] in ("torch", "tulle")
