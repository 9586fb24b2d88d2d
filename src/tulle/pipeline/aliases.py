"""What is one list in two places of a call's arguments is one list for the module, too, though it sees copies."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from operator import is_
from typing import Any

from tulle.pipeline.filled import can_change
from tulle.pipeline.plain import is_plain
from tulle.pipeline.structure import held_by

Pattern = Sequence[int]
"""For each list, dictionary and dataclass, in the order in which they are met, the number of the first that is it."""


def pattern_of(value: Any) -> Pattern | None:
    """Which of what can be changed in a value is the same; None if all differ.

    Example:
        >>> one = [1]
        >>> pattern_of((one, {"a": one})), pattern_of((one, {"a": [1]}))
        ((0, 1, 0), None)
    """
    found: list[int] = []
    _walk(value, {}, found)
    return None if found == list(range(len(found))) else tuple(found)


def _walk(value: Any, seen: dict[int, int], found: list[int]) -> None:
    if can_change(type(value)):
        first = seen.setdefault(id(value), len(found))
        found.append(first)
        if first != len(found) - 1:
            return
    for one in _held(value):
        _walk(one, seen, found)


def _held(value: Any) -> Sequence[Any]:
    if isinstance(value, tuple):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type | dict):
        return list(held_by(value).values())
    if is_plain(value):  # an object, which is one wherever it is
        return ()
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list | deque) else ()


def as_before(function: Callable[..., Any], pattern: Pattern | None) -> Callable[..., Any]:
    """The function, but what the pattern says is one in its arguments, which are copies.

    Args:
        function: It.
        pattern: Of `(args, kwargs)` before they were copied.
    """
    if pattern is None:
        return function

    def run(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = joined((args, kwargs), pattern)
        return function(*args, **kwargs)

    return run


def joined(value: Any, pattern: Pattern) -> Any:
    """A copy of a value in which is the same what was in the value that it is a copy of.

    Args:
        value: In which all differ; it is changed.
        pattern: Of the other.

    Example:
        >>> first, second = joined(([1], [1]), (0, 0))
        >>> first is second
        True
    """
    return _joined(value, iter(pattern), [])


def _joined(value: Any, pattern: Iterator[int], made: list[Any]) -> Any:
    if can_change(type(value)):
        first = next(pattern)
        made.append(value)
        if first != len(made) - 1:
            return made[first]
    held = _held(value)
    content = [_joined(one, pattern, made) for one in held]
    if all(map(is_, content, held)):
        return value
    if isinstance(value, tuple):
        return tuple.__new__(type(value), content)
    if isinstance(value, list | deque):
        for number, one in enumerate(content):
            value[number] = one
    elif isinstance(value, dict):
        for key, one in zip(list(value), content, strict=True):
            value[key] = one
    else:
        for name, one in zip(held_by(value), content, strict=True):
            object.__setattr__(value, name, one)
    return value
