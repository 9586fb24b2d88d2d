"""Plain objects: of classes that Python code defines, without fields of C, whose content can be seen and set.

Modules, tensors, errors, iterators and what is of Python's own library or of torch are none; distributions, namespaces
and classes derived of lists and dictionaries are.
"""

from __future__ import annotations

import argparse
import collections
import sys
from collections import deque
from collections.abc import Iterable, Mapping
from copyreg import _slotnames  # type: ignore[attr-defined]
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn

from tulle.pipeline.structure import ATOMS, is_atom

State = dict[str, Any]
"""What an object holds, by the names of attributes; as `ITEMS` what is in it, if it is a list or dictionary too."""
ITEMS = "[]"
_PLAIN_OF_PYTHON = (
    SimpleNamespace,
    argparse.Namespace,
    collections.UserDict,
    collections.UserList,
    collections.Counter,
)
_BASES = (collections.OrderedDict, collections.defaultdict, dict, list, SimpleNamespace, object)
_NEVER = (nn.Module, Tensor, Enum, BaseException, type)
_ATOMIC = (int, float, complex, str, bytes, type(None), nn.Module, type)
_MOST_ITEMS = 512
"""Of a list or dictionary without tensors, such as a vocabulary; one that has more stays as it is."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """How objects of a class are taken apart."""

    base: type
    slots: tuple[str, ...]
    has_attributes: bool


@lru_cache(maxsize=4096)
def _kind(kind: type) -> _Kind | None:
    package = kind.__module__.partition(".")[0]
    if package in sys.stdlib_module_names and _is_of(kind.__module__, kind) and not issubclass(kind, _PLAIN_OF_PYTHON):
        return None
    if package in ("numpy", "torch", "tulle") and not kind.__module__.startswith("torch.distributions."):
        return None
    if issubclass(kind, _NEVER) or hasattr(kind, "__next__") or hasattr(kind, "__torch_function__"):
        return None
    base = next(one for one in _BASES if issubclass(kind, one))
    slots = tuple(_slotnames(kind))
    # What is larger has fields of C, which nobody sees.
    if kind.__basicsize__ > base.__basicsize__ + 8 * (len(slots) + 2) or kind.__itemsize__:
        return None
    has_attributes = kind.__dictoffset__ != 0
    is_plain = has_attributes or slots or issubclass(base, dict | list)
    return _Kind(base, slots, has_attributes) if is_plain else None


def _is_of(module: str, kind: type) -> bool:
    """Whether a class is in the module whose name it bears: that may be of who made it by a call."""
    found: Any = sys.modules.get(module)
    for name in kind.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is kind


def is_plain(value: object) -> bool:
    """Whether a leaf is an object that is taken apart.

    Example:
        >>> from torch.distributions import Normal
        >>> [is_plain(one) for one in (SimpleNamespace(x=1), Normal(0.0, 1.0), nn.Tanh(), 3, print)]
        [True, True, False, False, False]
    """
    return not is_atom(value) and _kind(type(value)) is not None


def is_plain_kind(kind: type) -> bool:
    """Whether objects of a class are taken apart, if they are leaves."""
    return not issubclass(kind, ATOMS) and _kind(kind) is not None


def state_of(value: Any, *, is_all: bool = False) -> State:
    """What an object holds, in a dictionary of its own; what is much and no tensors only if all is asked for."""
    kind = _kind(type(value))
    assert kind is not None, "only of objects that are plain"
    state: State = {}
    if kind.has_attributes:
        own = object.__getattribute__(value, "__dict__")
        state = {name: one for name, one in own.items() if is_all or not is_bulk(one)}
    for name in kind.slots:
        one = _slot(value, name)
        if one is not _UNSET and (is_all or not is_bulk(one)):
            state[name] = one
    if issubclass(kind.base, dict) and (is_all or not is_bulk(value)):
        state[ITEMS] = dict(kind.base.items(value))
    if kind.base is list and (is_all or not is_bulk(value)):
        state[ITEMS] = list(list.__iter__(value))
    return state


def attributes_of(value: Any) -> dict[str, Any] | None:
    """The attributes of an object that holds nothing else, itself; None of others."""
    kind = _kind(type(value))
    assert kind is not None, "only of objects that are plain"
    if kind.slots or issubclass(kind.base, dict | list):
        return None
    return object.__getattribute__(value, "__dict__")


_UNSET: Any = object()


def _slot(value: Any, name: str) -> Any:
    try:
        return object.__getattribute__(value, name)
    except AttributeError:
        return _UNSET


def is_bulk(value: object) -> bool:
    """Whether it is much, and no tensors, as far as its first items tell."""
    if not isinstance(value, list | dict | tuple | set) or len(value) <= _MOST_ITEMS:
        return False
    items: Iterable[Any] = value.values() if isinstance(value, dict) else value
    return all(isinstance(one, int | float | str | bytes | type(None)) for one, _ in zip(items, range(8), strict=False))


def set_state(value: Any, state: State, now: Iterable[str] = ()) -> None:
    """Have an object hold that, and nothing else.

    Args:
        value: The object.
        state: What it is to hold.
        now: Names of what it holds.
    """
    kind = _kind(type(value))
    assert kind is not None, "only of objects that are plain"
    own = object.__getattribute__(value, "__dict__") if kind.has_attributes else {}
    for name in set(now).difference(state):
        if name in own:
            del own[name]
        elif name in kind.slots:
            object.__delattr__(value, name)
    for name, one in state.items():
        if name == ITEMS:
            if issubclass(kind.base, dict):
                kind.base.clear(value)
                for key, content in one.items():
                    kind.base.__setitem__(value, key, content)
            else:
                list.__setitem__(value, slice(None), one)
        elif name in kind.slots:
            object.__setattr__(value, name, one)
        else:
            own[name] = one


def held_in(value: object) -> list[Any]:
    """What is in a list, dictionary or object, and is no mere number or text.

    Example:
        >>> held_in(SimpleNamespace(a=1, b=[2], c={"d": (3,)}))
        [[2], {'d': (3,)}]
    """
    if isinstance(value, _ATOMIC) or is_bulk(value):
        return []
    held: Iterable[Any] = ()
    if isinstance(value, Mapping):
        held = value.values()
    elif isinstance(value, list | tuple | set | deque):
        held = value
    elif is_plain(value):
        held = state_of(value).values()
    return [one for one in held if not isinstance(one, _ATOMIC)]


def new_of(kind: type) -> Any:
    """An object of a class that holds nothing."""
    how = _kind(kind)
    assert how is not None, "only what is plain is told so"
    make: Any = how.base.__new__
    return make(kind)


def copy_of(value: Any) -> Any:
    """An object that holds the same."""
    made = new_of(type(value))
    set_state(made, state_of(value, is_all=True))
    return made
