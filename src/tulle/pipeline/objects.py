"""Objects of the user's own that placed modules are given, change or make: a batch of graphs, a distribution, a cache.

What such an object holds is an argument of the module, and what the module makes of it a result. Each rank's object
holds placeholders; at the module's rank the same object holds tensors for as long as the module runs:

    batch.x = 2 * batch.x      between modules: a placeholder on every rank
    layer(batch)               runs as layer(states, batch), states = ({"x": ..., "edges": ...},) put into the batch
                               and tells what it returned, what it has put into the batch, and what objects it made

What lives on other ranks is brought only if the module reads it, for a cache is given to every layer and holds what all
others have made: the module's first run with arguments of such shapes stops there, and begins anew when it has come.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tulle.errors import ModelError
from tulle.pipeline.filled import fill
from tulle.pipeline.plain import State, copy_of, is_plain, new_of, set_state, state_of
from tulle.pipeline.structure import Fixed, Node, Spec, flatten, node, rebuild
from tulle.pipeline.untouched import undoing


@dataclass(frozen=True, slots=True)
class Ref(Fixed):
    """An object, by its number among those that a call is given and then those that it made, and its class's name."""

    number: int
    kind: str


@dataclass(frozen=True, slots=True)
class Left(Fixed):
    """What a module has left as it was without having read it, by its number among the leaves of the call."""

    leaf: int


@dataclass(frozen=True, slots=True)
class Wanted(Fixed):
    """Instead of a result: a module is to be run when these leaves of the call have come to its rank."""

    leaves: tuple[int, ...]


class Told(NamedTuple):
    """What a call gives, with `Ref` for objects, and the objects that it made."""

    value: Any
    made: tuple[tuple[type, State], ...]


class Asked(BaseException):
    """A module reads what was not brought.

    Args:
        leaf: The number of that.
    """

    def __init__(self, leaf: int) -> None:
        super().__init__(leaf)
        self.leaf = leaf


class Lent:
    """The objects that a module is given, and what they hold.

    Args:
        leaves: Of its arguments.
        spec: How these are put together: `(args, kwargs)`.
    """

    def __init__(self, leaves: Sequence[Any], spec: Spec) -> None:
        self.objects: list[Any] = []
        self._numbers: dict[int, int] = {}
        of_arguments = list(map(self._folded, leaves))
        self.leaves: list[Any] = []
        """Of what the objects hold, then of the arguments."""
        self._ends: list[int] = []
        specs: list[Spec] = []
        for one in self.objects:  # which grow, by objects in objects
            found, how = flatten(state_of(one))
            self.leaves += map(self._folded, found)
            self._ends.append(len(self.leaves))
            specs.append(how)
        self.count = len(self.leaves)
        """So many leaves are what objects hold."""
        self.leaves += of_arguments
        assert isinstance(spec, Node), "a tuple and a dictionary"
        args, kwargs = spec.children
        assert isinstance(args, Node), "a tuple"
        states = node(tuple, None, tuple(specs))
        self.spec: Spec = node(tuple, None, (node(tuple, None, (states, *args.children)), kwargs))
        """How they are put together: `((states, *args), kwargs)`."""
        self.brought: set[int] = set()
        """Numbers of those of what objects hold that come to the module's rank, because it reads them."""
        self.may_ask = True
        """Whether other ranks do not know yet what the module reads of them."""
        self.unread: dict[int, int] = {}
        """Numbers of those that stay placeholders while the module runs, by identity."""
        self.absent: set[int] = set()
        """Those among them, by identity, that are not at the module's rank."""

    def _folded(self, leaf: Any) -> Any:
        if not is_plain(leaf):
            return leaf
        number = self._numbers.get(id(leaf))
        if number is None:
            number = self._numbers[id(leaf)] = len(self.objects)
            self.objects.append(leaf)
        return Ref(number, type(leaf).__qualname__)

    def wanted(self, leaf: int) -> Wanted:
        """What is to come, if a module reads that: all else of the same object, too."""
        begin, end = next(
            (begin, end) for begin, end in zip([0, *self._ends], self._ends, strict=False) if begin <= leaf < end
        )
        absent = [number for one, number in self.unread.items() if one in self.absent]
        return Wanted(tuple(sorted(number for number in absent if begin <= number < end)))

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """What puts into the objects what they hold here, and gives what the function gave, and what has changed."""

        def run(states: Sequence[State], *args: Any, **kwargs: Any) -> tuple[Any, dict[int, tuple[State, list[str]]]]:
            inside = list(map(_copied, states))
            before = [{name: flatten(value) for name, value in state.items()} for state in inside]
            outside = list(map(state_of, self.objects))
            after: list[State] = []
            try:
                for one, state in zip(self.objects, inside, strict=True):
                    set_state(one, state)
                result = function(*args, **kwargs)
            finally:
                for one, state in zip(self.objects, outside, strict=True):
                    after.append(state_of(one))
                    set_state(one, state, after[-1])
            return result, _changes(before, after)

        return run

    def tell(self, value: Any) -> Told:
        """What all ranks are told of `around`'s result."""
        return _told(value, self._numbers, self.unread)

    def take(self, told: Told, leaves: Sequence[Any]) -> Any:
        """What `tell` was given, in terms of all ranks' objects.

        Args:
            told: By the module's rank.
            leaves: Of the call, as all ranks see them.
        """
        return _taken(told, self.objects, leaves)

    def change(self, changes: dict[int, tuple[State, list[str]]]) -> None:
        """Do to the objects what the module has done to them."""
        for number, (changed, gone) in changes.items():
            before = state_of(self.objects[number])
            state = {name: fill(before.get(name), value) for name, value in changed.items()}
            set_state(self.objects[number], state, gone)

    def copied(self, leaves: Sequence[Any]) -> list[Any]:
        """Copies of the objects that hold other leaves."""
        objects = list(map(copy_of, self.objects))
        ((states, *_), _) = rebuild(self.spec, list(leaves))
        for one, state in zip(objects, states, strict=True):
            set_state(one, _whole(state, objects))
        return objects


def lent(leaves: Sequence[Any], spec: Spec) -> Lent | None:
    """The objects among the leaves of a module's arguments, if there are some."""
    return Lent(leaves, spec) if any(map(is_plain, leaves)) else None


def telling(function: Callable[..., Any], module: nn.Module, given: Lent | None) -> Callable[..., Any]:
    """What runs a module, and gives what all ranks are told of the result if there are objects in it, or were given."""

    def run(*args: Any, **kwargs: Any) -> Any:
        if given is not None:
            args, kwargs = _whole((args, kwargs), given.objects)
            undo = undoing(module) if given.absent and given.may_ask else None
            try:
                return given.tell(function(*args, **kwargs))
            except Asked as asked:
                if undo is None:
                    raise ModelError(
                        "it reads what an object holds that lives at another stage, which it did not with such "
                        "arguments before, so that nobody sends it: pass it as an argument"
                    ) from None
                undo()
                return given.wanted(asked.leaf)
        result = function(*args, **kwargs)
        if isinstance(result, Tensor) or not any(map(is_plain, flatten(result)[0])):
            return result
        return _told(result, {}, {})

    return run


def taken(result: Any, given: Lent | None, leaves: Sequence[Any]) -> Any:
    """The result of `telling` in terms of all ranks."""
    return _taken(result, given.objects if given else (), leaves) if isinstance(result, Told) else result


def objects_in(value: Any) -> Lent | None:
    """The objects in a value, if there are some."""
    return lent(*flatten(((value,), {})))


def mapped(value: Any, function: Callable[[list[Any]], list[Any]]) -> Any:
    """The same value with other leaves, also in the objects that it has.

    Args:
        value: With objects, into which the others are put.
        function: Gives all of these.
    """
    leaves, spec = flatten(value)
    given = objects_in(value)
    if given is None:
        others = function(leaves)
        return value if all(map(is_, leaves, others)) else rebuild(spec, others)
    ((states, value), _) = rebuild(given.spec, function(given.leaves))
    for one, state in zip(given.objects, states, strict=True):
        set_state(one, _whole(state, given.objects))
    return _whole(value, given.objects)


def _told(value: Any, numbers: dict[int, int], unread: dict[int, int]) -> Told:
    numbers = dict(numbers)
    made: list[Any] = []
    kept: list[Any] = []  # so that no two have the same identity

    def folded(value: Any) -> Any:
        if isinstance(value, Tensor) and id(value) not in unread:
            return value
        leaves, spec = flatten(value)
        return rebuild(spec, list(map(ref, leaves)))

    def ref(leaf: Any) -> Any:
        if id(leaf) in unread:
            return Left(unread[id(leaf)])
        if not is_plain(leaf):
            return leaf
        if id(leaf) not in numbers:
            numbers[id(leaf)], place = len(numbers), len(made)
            kept.append(leaf)
            made.append(None)
            made[place] = type(leaf), {name: folded(one) for name, one in state_of(leaf).items()}
        return Ref(numbers[id(leaf)], type(leaf).__qualname__)

    return Told(folded(value), tuple(made))


def _taken(told: Told, objects: Sequence[Any], leaves: Sequence[Any]) -> Any:
    objects = [*objects, *(new_of(kind) for kind, _ in told.made)]
    for one, (_, state) in zip(objects[len(objects) - len(told.made) :], told.made, strict=True):
        set_state(one, _whole(state, objects, leaves))
    return _whole(told.value, objects, leaves)


def _whole(value: Any, objects: Sequence[Any], leaves: Sequence[Any] = ()) -> Any:
    """The same value with objects in the place of references."""
    found, spec = flatten(value)
    if not any(isinstance(leaf, Ref | Left) for leaf in found):
        return value
    return rebuild(spec, [_meant(leaf, objects, leaves) for leaf in found])


def _copied(state: State) -> State:
    """The same, with lists and dictionaries of its own."""
    found, spec = flatten(state)
    return rebuild(spec, found)


def _meant(leaf: Any, objects: Sequence[Any], leaves: Sequence[Any]) -> Any:
    if isinstance(leaf, Ref):
        return objects[leaf.number]
    return leaves[leaf.leaf] if isinstance(leaf, Left) else leaf


def _changes(
    before: Sequence[dict[str, tuple[list[Any], Spec]]], after: Sequence[State]
) -> dict[int, tuple[State, list[str]]]:
    """Of each object that has changed what it holds anew, and the names of what it holds no more."""
    found: dict[int, tuple[State, list[str]]] = {}
    for number, (was, now) in enumerate(zip(before, after, strict=True)):
        changed = {name: value for name, value in now.items() if name not in was or not _is_same(was[name], value)}
        gone = [name for name in was if name not in now]
        if changed or gone:
            found[number] = changed, gone
    return found


def _is_same(before: tuple[list[Any], Spec], value: Any) -> bool:
    leaves, spec = flatten(value)
    return spec is before[1] and all(map(_is_as_before, before[0], leaves))


def _is_as_before(one: Any, other: Any) -> bool:
    if one is other:
        return True
    return type(one) is type(other) and isinstance(one, int | float | str | bytes | torch.Size) and one == other
