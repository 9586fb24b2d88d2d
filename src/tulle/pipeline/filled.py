"""Lists and dictionaries that a placed module is given and fills: with a loss for whoever sums them up, say.

The module sees others of the same content, with tensors instead of placeholders. What it changes in these is told as if
it had returned it, and then done to the caller's.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable
from functools import cache
from operator import is_
from typing import Any

from tulle.pipeline.structure import Node, Spec, flatten


@cache
def can_be_filled(spec: Spec) -> bool:
    """Whether among arguments `(args, kwargs)` of that structure there is something that can be changed.

    Example:
        >>> [can_be_filled(flatten((args, {}))[1]) for args in [(1, (2, 3)), (1, ([2], 3))]]
        [False, True]
    """
    assert isinstance(spec, Node), "a tuple and a dictionary"
    return any(_is_open(one) for both in spec.children if isinstance(both, Node) for one in both.children)


def _is_open(spec: Spec) -> bool:
    return isinstance(spec, Node) and (_can_change(spec.kind) or any(map(_is_open, spec.children)))


def _can_change(kind: type) -> bool:
    parameters = getattr(kind, "__dataclass_params__", None)
    return issubclass(kind, list | dict | deque) or (parameters is not None and not parameters.frozen)


def with_filled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, but it gives its arguments besides, if it has changed what is in them, else None."""

    def run(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        before, spec = flatten((args, kwargs))
        result = function(*args, **kwargs)
        after, now = flatten((args, kwargs))
        is_same = now is spec and all(map(is_, before, after))
        return result, None if is_same else (args, kwargs)

    return run


def fill(given: Any, changed: Any) -> Any:
    """Have what was given hold what the changed copy of it holds, as far as it can be changed; give it, or the copy.

    Example:
        >>> given = (losses := [1, 2], {"a": 3})
        >>> fill(given, ([1, 2, 4], {"a": 3, "b": 5}))
        ([1, 2, 4], {'a': 3, 'b': 5})
        >>> losses
        [1, 2, 4]
    """
    if type(given) is not type(changed):
        return changed
    if isinstance(given, dict):
        for key in [key for key in given if key not in changed]:
            del given[key]
        for key, value in changed.items():
            given[key] = fill(given.get(key), value)
        return given
    if isinstance(given, list | deque):
        content = [fill(one, value) for one, value in zip(given, changed, strict=False)]
        content += list(changed)[len(content) :]
        given.clear()
        given.extend(content)
        return given
    if type(given) is tuple:
        content = tuple([fill(one, value) for one, value in zip(given, changed, strict=False)])
        return given if len(content) == len(changed) and all(map(is_, content, given)) else content
    if dataclasses.is_dataclass(given) and _can_change(type(given)):
        for name in vars(changed):
            setattr(given, name, fill(getattr(given, name, None), getattr(changed, name)))
        return given
    return changed
