"""Activation checkpointing across modules: what is checkpointed around placed modules becomes checkpointing of each.

`torch.utils.checkpoint` runs a function again during backward. Of a function that calls placed modules only one rank
would do that, and it would meet placeholders; so within it each placed module is checkpointed by itself on its owner,
and operations between modules keep what they save. The reentrant variant, and every other `autograd.Function` that is
applied to placeholders or parameters, is met where `Function.apply` ends, which no other hook of torch sees: by the
class above, so that `square = Square.apply`, taken as a name before the model was placed, is met, too.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from functools import lru_cache
from inspect import getattr_static
from typing import Any

import torch
from torch import nn
from torch.autograd import Function
from torch.nn.modules._functions import BackwardHookFunction
from torch.utils.checkpoint import CheckpointFunction, checkpoint

from tulle.errors import ModelError
from tulle.pipeline.placeholder import Placeholder, running

_is_asked: ContextVar[bool] = ContextVar("_is_asked", default=False)
"""Whether the reentrant variant is around us."""
_is_within_function: ContextVar[bool] = ContextVar("_is_within_function", default=False)
_above: Any = Function.__base__ if hasattr(getattr_static(Function, "apply"), "__func__") else Function
"""Whose `apply` is ours: `Function.apply` calls that of the class above; from torch 2.15 on it is one of C's itself."""
_apply = getattr_static(_above, "apply")
_autograd: Any = vars(torch._C)["_autograd"]


def is_within_function() -> bool:
    """Whether the forward of an `autograd.Function` runs, whose backward may run again what it calls."""
    return _is_within_function.get()


class outside_of_checkpoint:  # noqa: N801 - used like a function; a class costs half as much as a generator
    """Save activations as if no checkpointed function were around."""

    __slots__ = ("_hooks",)

    def __enter__(self) -> None:
        self._hooks: list[tuple[Any, Any]] = []
        while (hooks := _hooks_of_checkpoint()) is not None:  # they may be within one another
            self._hooks.append(hooks)
            _autograd._pop_saved_tensors_default_hooks()

    def __exit__(self, *_: object) -> None:
        while self._hooks:
            _autograd._push_saved_tensors_default_hooks(*self._hooks.pop())


def is_checkpointed() -> bool:
    """Whether the program is within a checkpointed function, or what is saved for backward goes elsewhere."""
    return _is_asked.get() or _autograd._top_saved_tensors_default_hooks(True) is not None


def as_checkpointed(function: Callable[..., Any], module: nn.Module) -> Callable[..., Any]:
    """What runs a placed module; again during backward, if the program is within a checkpointed function.

    A module that writes in what it is given (`nn.ReLU(inplace=True)`) would find that changed, and keeps what it gives.
    """
    is_again = torch.is_grad_enabled() and not getattr(module, "inplace", False)
    if is_again and (_is_asked.get() or _hooks_of_checkpoint() is not None):
        return lambda *args, **kwargs: checkpoint(function, *args, use_reentrant=False, **kwargs)
    return function


def intercept_functions() -> None:
    """From now on, have `autograd.Function`s that are applied to placeholders run as operations between modules."""
    _above.apply = classmethod(_apply_where_it_belongs)


def _apply_where_it_belongs(kind: type[Function], *args: Any, **kwargs: Any) -> Any:
    program = running.get()
    is_between_modules = program is not None and program.is_between_modules
    if kind is CheckpointFunction and is_between_modules:
        function, _, *rest = args
        token = _is_asked.set(True)
        try:
            return function(*rest)
        finally:
            _is_asked.reset(token)
    placeholder = next((leaf for leaf in args if isinstance(leaf, Placeholder)), None)
    if placeholder is not None:
        if kind is BackwardHookFunction:
            raise ModelError(
                "a hook of backward (register_full_backward_hook, register_full_backward_pre_hook) is on a module that "
                "was not placed itself, but has placed modules within, or on all modules: put it on those that are "
                "placed, each on one rank"
            )
        return placeholder.program.apply(_application(kind), args, kwargs)
    if program is not None and is_between_modules and any(isinstance(leaf, nn.Parameter) for leaf in args):
        return program.apply(_application(kind), args, kwargs)
    return _application(kind)(*args, **kwargs)


@lru_cache(maxsize=256)  # one for each kind, since outcomes are looked up by what ran
def _application(kind: type[Function]) -> Callable[..., Any]:
    def apply(*args: Any, **kwargs: Any) -> Any:
        token = _is_within_function.set(kind is not CheckpointFunction)
        try:
            return _apply.__get__(None, kind)(*args, **kwargs)
        finally:
            _is_within_function.reset(token)

    apply.__name__, apply.__module__ = kind.__name__, kind.__module__
    return apply


def _hooks_of_checkpoint() -> tuple[Any, Any] | None:
    hooks = _autograd._top_saved_tensors_default_hooks(True)
    return hooks if hooks is not None and "checkpoint" in hooks[0].__qualname__ else None
