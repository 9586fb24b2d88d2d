"""`Remembered`: what a value is and holds at one time, by reference, to be compared later and put back."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from tulle.generators import GENERATORS, put_back, standing
from tulle.pipeline.held import is_as_before
from tulle.pipeline.plain import ITEMS, held_in, is_bulk, is_plain, is_plain_kind, set_state, state_of

_HOLD_SOMETHING = (list, tuple, set, deque, Mapping)
_NO_CONTENTS: Sequence[tuple[Any, Any]] = ()
ABSENT: Any = object()
"""The value of an attribute that is not there."""


class Remembered:
    """A value, what lists, dictionaries, sets and plain objects in it hold, and where generators stand.

    Of tensors not the numbers.

    Args:
        value: As it is now.
    """

    __slots__ = ("_contents", "value")

    def __init__(self, value: Any) -> None:
        self.value = value
        self._contents = _contents(value) if _can_hold(type(value)) else _NO_CONTENTS

    def is_like(self, other: Remembered) -> bool:
        """Whether nothing was set between the two."""
        if not is_as_before(self.value, other.value):
            return False
        mine, theirs = self._contents, other._contents
        return len(mine) == len(theirs) and all(
            one is another and _holds_as_before(one, content, changed)
            for (one, content), (another, changed) in zip(mine, theirs, strict=True)
        )

    def put_back(self, holder: dict[Any, Any], name: Hashable) -> None:
        """Have a dictionary hold the value by that name, and what is in it hold what it held."""
        if holder.get(name, ABSENT) is not self.value:
            if self.value is ABSENT:
                del holder[name]
            else:
                holder[name] = self.value
        for one, content in self._contents:
            _refill(one, content)


@lru_cache(maxsize=4096)
def _can_hold(kind: type) -> bool:
    """Whether there may be something in what is of a class."""
    return issubclass(kind, (*_HOLD_SOMETHING, *GENERATORS)) or is_plain_kind(kind)


def _contents(value: Any) -> list[tuple[Any, Any]]:
    """What can change in a value, and what each of it holds."""
    found: list[tuple[Any, Any]] = []
    ahead, seen = [value], set[int]()
    while ahead:
        one = ahead.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        content = _content(one)
        if content is not None:
            found.append((one, content))
        ahead += held_in(one)
    return found


def _content(value: Any) -> Any:
    """A copy of what a value holds, if that can change and is not much."""
    if is_bulk(value):
        return None
    if is_plain(value):
        return state_of(value, is_all=True)
    if isinstance(value, list | dict | set | deque):
        return dict(value) if isinstance(value, dict) else set(value) if isinstance(value, set) else list(value)
    return standing(value) if isinstance(value, GENERATORS) else None


def _holds_as_before(value: Any, content: Any, now: Any) -> bool:
    """Whether a value holds what it held; of a class derived of `dict` or `list` each copy has its items anew."""
    if isinstance(value, GENERATORS):
        return content == now
    if type(content) is dict and ITEMS in content and is_plain(value):
        content, now = dict(content), dict(now)
        if not _is_same(content.pop(ITEMS), now.pop(ITEMS, _NO_CONTENTS)):
            return False
    return _is_same(content, now)


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, set):
        return one == other
    if len(one) != len(other):
        return False
    if isinstance(one, dict):
        return all(map(_is_one, one, other)) and all(map(is_as_before, one.values(), other.values()))
    return all(map(is_as_before, one, other))


def _is_one(key: Any, other: Any) -> bool:
    return key is other or key == other


def _refill(value: Any, content: Any) -> None:
    if isinstance(value, GENERATORS):
        put_back(value, content)
        return
    now = _content(value)
    if now is None or _holds_as_before(value, content, now):  # what has become much since is left alone
        return
    if is_plain(value):
        set_state(value, content, now)
        return
    value.clear()
    if isinstance(value, list | deque):
        value.extend(content)
    else:
        value.update(content)
