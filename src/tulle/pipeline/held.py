"""What plain objects hold, as arguments of a call: put there for as long as a module runs, and what it has changed.

An object that holds tensors and plain values only (a layer's keys and values) is `Settled`: as long as it holds the
same ones, it need not be looked at again. Of all others every content is looked through: `Loose`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor

from tulle.pipeline.plain import State, attributes_of, set_state, state_of
from tulle.pipeline.shapes import about
from tulle.pipeline.structure import Fixed, Spec, flatten, is_atom, rebuild

Change = tuple[State, list[str]]
"""What an object holds anew, by name, and the names of what it holds no more."""


class About:
    """All of an object that the outcome of a call can depend on, but for its tensors; its hash is reckoned once."""

    __slots__ = ("_content", "_hash")

    def __init__(self, content: Hashable) -> None:
        self._content, self._hash = content, hash(content)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, About) and self._content == other._content)

    def __repr__(self) -> str:
        return repr(self._content)


class Settled:
    """The content of an object that holds no other objects, lists or dictionaries.

    Args:
        own: Its attributes.
    """

    __slots__ = ("_names", "_own", "_places", "_values", "about", "leaves")

    def __init__(self, kind: type, own: dict[str, Any]) -> None:
        self._own = own
        self._names, self._values = tuple(own), tuple(own.values())
        self._places = [name for name, value in own.items() if isinstance(value, Tensor)]
        self.leaves: list[Any] = [own[name] for name in self._places]
        """Its tensors."""
        plain = [None if isinstance(value, Tensor) else about(value) for value in self._values]
        self.about: Hashable = About((kind.__qualname__, self._names, tuple(plain)))

    def is_now(self, own: dict[str, Any]) -> bool:
        """Whether that is what the object, whose attributes these are, still holds."""
        values = self._values
        return (
            own is self._own
            and len(own) == len(values)
            and tuple(own) == self._names
            and all(map(is_, own.values(), values))
        )

    def state(self, leaves: Sequence[Any]) -> State:
        """The content with other tensors."""
        return dict(zip(self._names, self._values, strict=True)) | dict(zip(self._places, leaves, strict=True))

    def inside(self, leaves: Sequence[Any]) -> Any:
        """What `lend` takes, of other tensors."""
        return leaves

    def lend(self, leaves: Sequence[Any]) -> Callable[[], Change | None]:
        """Have the object hold other tensors; give what takes them back, and tells what has changed meanwhile."""
        own, places = self._own, self._places
        for name, leaf in zip(places, leaves, strict=True):
            own[name] = leaf
        inside = tuple(own.values())

        def back() -> Change | None:
            if len(own) == len(inside) and tuple(own) == self._names and all(map(is_, own.values(), inside)):
                for name, leaf in zip(places, self.leaves, strict=True):
                    own[name] = leaf
                return None
            was = dict(zip(self._names, inside, strict=True))
            changed = {name: one for name, one in own.items() if name not in was or not is_as_before(was[name], one)}
            gone = [name for name in was if name not in own]
            own.clear()
            own.update(zip(self._names, self._values, strict=True))
            return (changed, gone) if changed or gone else None

        return back


class Loose:
    """The content of any object.

    Args:
        one: The object.
        folded: Gives the reference that stands for an object in it; anything else as it is.
    """

    __slots__ = ("_one", "_spec", "about", "leaves", "whole")

    def __init__(self, one: Any, folded: Callable[[Any], Any]) -> None:
        self._one, self.whole = one, state_of(one)
        leaves, self._spec = flatten(self.whole)
        self.leaves: list[Any] = list(map(folded, leaves))
        self.about: Hashable = (type(one).__qualname__, self._spec)

    def state(self, leaves: Sequence[Any]) -> State:
        """The content with other leaves."""
        return rebuild(self._spec, list(leaves))

    def inside(self, leaves: Sequence[Any]) -> Any:
        """What `lend` takes, of other leaves: with lists and dictionaries of its own."""
        return self.state(leaves)

    def lend(self, inside: State) -> Callable[[], Change | None]:
        """Have the object hold that; give what takes it back, and tells what has changed meanwhile."""
        one, outside = self._one, state_of(self._one)
        before = {name: flatten(value) for name, value in inside.items()}
        set_state(one, inside)

        def back() -> Change | None:
            now = state_of(one)
            set_state(one, outside, now)
            changed = {name: value for name, value in now.items() if not _is_same(before.get(name), value)}
            gone = [name for name in before if name not in now]
            return (changed, gone) if changed or gone else None

        return back


Held = Settled | Loose


def settled(one: Any) -> Settled | None:
    """The content of an object, if it is settled."""
    own = attributes_of(one)
    return Settled(type(one), own) if own is not None and all(map(is_atom, own.values())) else None


def _is_same(before: tuple[list[Any], Spec] | None, value: Any) -> bool:
    if before is None:
        return False
    leaves, spec = flatten(value)
    return spec is before[1] and all(map(is_as_before, before[0], leaves))


def is_as_before(one: Any, other: Any) -> bool:
    """Whether a leaf is the same as another."""
    if one is other:
        return True
    return type(one) is type(other) and isinstance(one, int | float | str | bytes | torch.Size | Fixed) and one == other
