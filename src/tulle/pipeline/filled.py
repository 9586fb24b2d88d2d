"""Lists and dictionaries that a placed module is given and fills: with a loss for whoever sums them up, say.

The module sees others of the same content, with tensors instead of placeholders. What it changes in these is told as if
it had returned it, and then done to the caller's.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any
from weakref import WeakKeyDictionary

from tulle.pipeline.structure import Fixed, Node, Spec, flatten, held_by, rebuild


def can_be_filled(spec: Spec) -> bool:
    """Whether among arguments `(args, kwargs)` of that structure there is something that can be changed.

    Example:
        >>> [can_be_filled(flatten((args, {}))[1]) for args in [(1, (2, 3)), (1, ([2], 3))]]
        [False, True]
    """
    known = _can_be_filled.get(spec)
    if known is None:
        assert isinstance(spec, Node), "a tuple and a dictionary"
        known = any(_is_open(one) for both in spec.children if isinstance(both, Node) for one in both.children)
        _can_be_filled[spec] = known
    return known


_can_be_filled: WeakKeyDictionary[Spec, bool] = WeakKeyDictionary()
"""What was said before, of structures that somebody holds."""


def _is_open(spec: Spec) -> bool:
    return isinstance(spec, Node) and (can_change(spec.kind) or any(map(_is_open, spec.children)))


def can_change(kind: type) -> bool:
    """Whether what is in something of that class can be changed, and is taken apart."""
    parameters = getattr(kind, "__dataclass_params__", None)
    return issubclass(kind, list | dict | deque) or (parameters is not None and not parameters.frozen)


@dataclass(frozen=True, slots=True)
class GivenBack(Fixed):
    """In a result: what is one of the arguments, or in one, by its number among what can be changed in these."""

    number: int


def with_filled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, but it gives its arguments besides, if it has changed what is in them, else None.

    What it gives that is one of the lists, dictionaries and dataclasses that it was given is told so.
    """

    def run(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        before, spec = flatten((args, kwargs))
        open_ones = {id(one): number for number, one in enumerate(changeable_in((args, kwargs)))}
        result = _marked(function(*args, **kwargs), open_ones)
        after, now = flatten((args, kwargs))
        is_same = now is spec and all(map(is_, before, after))
        return result, None if is_same else (args, kwargs)

    return run


def changeable_in(value: Any) -> list[Any]:
    """What is in a value, and can be changed, in the order in which it is met."""
    found: list[Any] = []
    ahead = [value]
    while ahead:
        one = ahead.pop()
        if can_change(type(one)):
            found.append(one)
        if isinstance(one, dict):
            ahead += one.values()
        elif isinstance(one, list | tuple | deque):
            ahead += one
        elif dataclasses.is_dataclass(one) and not isinstance(one, type):
            ahead += held_by(one).values()
    return found


def _marked(result: Any, open_ones: Mapping[int, int]) -> Any:
    if id(result) in open_ones:
        return GivenBack(open_ones[id(result)])
    if type(result) in (tuple, list):
        return type(result)([_marked(one, open_ones) for one in result])
    if type(result) is dict:
        return {key: _marked(one, open_ones) for key, one in result.items()}
    return result


def unmarked(result: Any, open_ones: Sequence[Any]) -> Any:
    """The result with the caller's own in the place of what it was given back.

    Args:
        result: Of `with_filled`.
        open_ones: `changeable_in` the arguments, as the caller has them.
    """
    leaves, spec = flatten(result)
    if not any(isinstance(leaf, GivenBack) for leaf in leaves):
        return result
    return rebuild(spec, [open_ones[leaf.number] if isinstance(leaf, GivenBack) else leaf for leaf in leaves])


def fill(given: Any, changed: Any) -> Any:
    """Have what was given hold what the changed copy of it holds, as far as it can be changed; give it, or the copy.

    Example:
        >>> given = (losses := [1, 2], {"a": 3})
        >>> fill(given, ([1, 2, 4], {"a": 3, "b": 5}))
        ([1, 2, 4], {'a': 3, 'b': 5})
        >>> losses
        [1, 2, 4]
    """
    if given is changed or type(given) is not type(changed):
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
    if dataclasses.is_dataclass(given) and can_change(type(given)):
        for name in vars(changed):
            setattr(given, name, fill(getattr(given, name, None), getattr(changed, name)))
        return given
    return changed
