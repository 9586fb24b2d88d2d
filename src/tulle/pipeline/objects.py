"""Objects of the user's own that placed modules are given, change or make: a batch of graphs, a distribution, a cache.

What such an object holds is an argument of the module, and what the module makes of it a result. Each rank's object
holds placeholders; at the module's rank the same object holds tensors for as long as the module runs:

    batch.x = 2 * batch.x      between modules: a placeholder on every rank
    layer(batch)               batch.x is an argument, and a tensor while the layer runs; all ranks are told what it
                               returned, what it has put into the batch, and what objects it made

What lives on other ranks is brought only if the module reads it, for a cache is given to every layer and holds what all
others have made: the module's first run with arguments of such shapes stops there, and begins anew when it has come.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from operator import is_
from typing import Any, NamedTuple

from torch import Tensor, nn

from tulle.errors import ModelError
from tulle.pipeline.aliases import joined, pattern_of
from tulle.pipeline.asking import Asked, AsksBeforeWriting
from tulle.pipeline.filled import fill
from tulle.pipeline.held import Change, Held, Loose, Settled, settled
from tulle.pipeline.plain import State, copy_of, is_plain, new_of, set_state, state_of
from tulle.pipeline.structure import ATOMS, Fixed, Spec, flatten, rebuild
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
    made: tuple[tuple[type | Ref, State], ...]
    """Their classes, or objects that have the same, and what they hold."""


class Lent:
    """The objects that a module is given, and what they hold.

    Args:
        leaves: Of its arguments.
        known: What objects were seen to hold, by their identity.
    """

    def __init__(self, leaves: Sequence[Any], known: dict[int, tuple[Any, Settled]]) -> None:
        self.objects: list[Any] = []
        self._numbers: dict[int, int] = {}
        of_arguments = list(map(self._folded, leaves))
        self.leaves: list[Any] = []
        """Of what the objects hold, then of the arguments."""
        self._held: list[Held] = []
        self._ends: list[int] = []
        for one in self.objects:  # which grow, by objects in objects
            held = self._held_by(one, known)
            self._held.append(held)
            self.leaves += held.leaves
            self._ends.append(len(self.leaves))
        self.count = len(self.leaves)
        """So many leaves are what objects hold."""
        self.leaves += of_arguments
        self.about = tuple([held.about for held in self._held])
        """All that the outcome of the call can depend on, beside the leaves."""
        self.brought: dict[int, None] = {}
        """Numbers of those of what objects hold that come to the module's rank, because it reads them; in order."""
        self.inside: Sequence[Any] = ()
        """What the objects hold while the module runs: the first leaves of the call, as its rank has them."""
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

    def _held_by(self, one: Any, known: dict[int, tuple[Any, Settled]]) -> Held:
        before = known.get(id(one))
        if before is not None and before[0] is one and before[1].is_now(vars(one)):
            return before[1]
        held = settled(one)
        if held is None:
            return Loose(one, self._folded)
        known[id(one)] = one, held
        return held

    def _of_each(self, leaves: Sequence[Any]) -> Iterator[tuple[Held, Sequence[Any]]]:
        for held, begin, end in zip(self._held, [0, *self._ends], self._ends, strict=False):
            yield held, leaves[begin:end]

    def wanted(self, leaf: int | None) -> Wanted:
        """What is to come, if a module reads that, or asks for all: all else of the same object, too."""
        absent = sorted(number for one, number in self.unread.items() if one in self.absent)
        if leaf is None:
            return Wanted(tuple(absent))
        begin, end = next(
            (begin, end) for begin, end in zip([0, *self._ends], self._ends, strict=False) if begin <= leaf < end
        )
        return Wanted(tuple(number for number in absent if begin <= number < end))

    def around(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any]:
        """What puts into the objects what they hold here, and gives what the function gave, and what has changed.

        Args:
            function: It.
            args: Of the call, as it was made, and
            kwargs: those by name.
        """
        # Of what is in both, the argument is what is looked at after.
        pattern = pattern_of((args, kwargs, [held.whole for held in self._held if isinstance(held, Loose)]))

        def run(*args: Any, **kwargs: Any) -> tuple[Any, dict[int, Change]]:
            changes: dict[int, Change] = {}
            leaves = [_meant(leaf, self.objects, ()) for leaf in self.inside]
            inside = [held.inside(own) for held, own in self._of_each(leaves)]
            if pattern is not None:
                loose = [one for one, held in zip(inside, self._held, strict=True) if isinstance(held, Loose)]
                args, kwargs, _ = joined((args, kwargs, loose), pattern)
            backs = [held.lend(own) for held, own in zip(self._held, inside, strict=True)]
            try:
                result = function(*args, **kwargs)
            finally:
                for number, back in enumerate(backs):
                    change = back()
                    if change is not None:
                        changes[number] = change
            return result, changes

        return run

    def tell(self, value: Any) -> Told:
        """What all ranks are told of `around`'s result."""
        return _told(value, self.objects, self._numbers, self.unread)

    def change(self, changes: dict[int, Change]) -> None:
        """Do to the objects what the module has done to them."""
        for number, (changed, gone) in changes.items():
            before = state_of(self.objects[number])
            state = {name: fill(before.get(name), value) for name, value in changed.items()}
            set_state(self.objects[number], state, gone)

    def put(self, leaves: Sequence[Any], objects: Sequence[Any] | None = None) -> Any:
        """Have the objects, or others in their places, hold other leaves.

        Args:
            leaves: All of them.
            objects: The others.
        """
        objects = self.objects if objects is None else objects
        for one, (held, own) in zip(objects, self._of_each(leaves), strict=True):
            set_state(one, _whole(held.state(own), objects))

    def copied(self, leaves: Sequence[Any]) -> list[Any]:
        """Copies of the objects that hold other leaves."""
        objects = list(map(copy_of, self.objects))
        self.put(leaves, objects)
        return objects


def lent(leaves: Sequence[Any], known: dict[int, tuple[Any, Settled]]) -> Lent | None:
    """The objects among the leaves of a module's arguments, if there are some.

    Args:
        leaves: Of the arguments.
        known: What objects were seen to hold, by their identity; is added to.
    """
    is_given = any(not isinstance(leaf, ATOMS) and is_plain(leaf) for leaf in leaves)
    return Lent(leaves, known) if is_given else None


def telling(function: Callable[..., Any], module: nn.Module, given: Lent | None) -> Callable[..., Any]:
    """What runs a module, and gives what all ranks are told of the result if there are objects in it, or were given."""

    def run(*args: Any, **kwargs: Any) -> Any:
        if given is not None:
            args, kwargs = _whole((args, kwargs), given.objects)
            may_ask = bool(given.absent) and given.may_ask
            undo = undoing(module) if may_ask else None
            tensors = [*flatten((args, kwargs))[0], *given.inside, *module.parameters()] if may_ask else ()
            try:
                with AsksBeforeWriting(tensors) if may_ask else nullcontext():
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
        return result if isinstance(result, Tensor) else told(result)

    return run


def taken(result: Any, given: Lent | None = None, leaves: Sequence[Any] = ()) -> Any:
    """What `telling` or `told` was given, in terms of all ranks.

    Args:
        result: Of `telling` or `told`.
        given: The objects that the module was given.
        leaves: Of the call, as all ranks see them.
    """
    return _taken(result, given.objects if given else (), leaves) if isinstance(result, Told) else result


def content_of(value: Any) -> tuple[list[Any], Spec]:
    """The leaves of a value, and of objects in it, and what puts them together again."""
    return flatten(told(value))


def with_content(spec: Spec, leaves: Sequence[Any]) -> Any:
    """The value with such content, and objects of its own."""
    return taken(rebuild(spec, list(leaves)))


def objects_in(value: Any) -> Lent | None:
    """The objects in a value, if there are some."""
    return lent(flatten(value)[0], {})


def copied(value: Any, function: Callable[[Any], Any]) -> Any:
    """The same value with another leaf for each, and copies of the objects that it has."""
    leaves, spec = flatten(value)
    given = lent(leaves, {})
    if given is None:
        return rebuild(spec, list(map(function, leaves)))
    others = list(map(function, given.leaves))
    return _whole(rebuild(spec, others[given.count :]), given.copied(others))


def mapped(value: Any, function: Callable[[list[Any]], list[Any]]) -> Any:
    """The same value with other leaves, also in the objects that it has.

    Args:
        value: With objects, into which the others are put.
        function: Gives all of these.
    """
    leaves, spec = flatten(value)
    given = lent(leaves, {})
    if given is None:
        others = function(leaves)
        return value if all(map(is_, leaves, others)) else rebuild(spec, others)
    others = function(given.leaves)
    given.put(others)
    return _whole(rebuild(spec, others[given.count :]), given.objects)


def holds_objects(leaves: Sequence[Any]) -> bool:
    """Whether an object is among the leaves of a value."""
    return any(map(is_plain, leaves))


def told(value: Any) -> Any:
    """What all ranks are told of a value in which there may be objects; `taken` makes the value of it again."""
    return _told(value, (), {}, {}) if holds_objects(flatten(value)[0]) else value


def _told(value: Any, objects: Sequence[Any], numbers: dict[int, int], unread: dict[int, int]) -> Told:
    numbers = dict(numbers)
    kinds = {type(one): Ref(number, type(one).__qualname__) for number, one in enumerate(objects)}  # some have no name
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
            made[place] = kinds.get(type(leaf), type(leaf)), {name: folded(one) for name, one in state_of(leaf).items()}
        return Ref(numbers[id(leaf)], type(leaf).__qualname__)

    return Told(folded(value), tuple(made))


def _taken(told: Told, objects: Sequence[Any], leaves: Sequence[Any]) -> Any:
    kinds = [type(objects[kind.number]) if isinstance(kind, Ref) else kind for kind, _ in told.made]
    objects = [*objects, *map(new_of, kinds)]
    for one, (_, state) in zip(objects[len(objects) - len(told.made) :], told.made, strict=True):
        set_state(one, _whole(state, objects, leaves))
    return _whole(told.value, objects, leaves)


def _whole(value: Any, objects: Sequence[Any], leaves: Sequence[Any] = ()) -> Any:
    """The same value with objects in the place of references."""
    found, spec = flatten(value)
    if not any(isinstance(leaf, Ref | Left) for leaf in found):
        return value
    return rebuild(spec, [_meant(leaf, objects, leaves) for leaf in found])


def _meant(leaf: Any, objects: Sequence[Any], leaves: Sequence[Any]) -> Any:
    if isinstance(leaf, Ref):
        return objects[leaf.number]
    return leaves[leaf.leaf] if isinstance(leaf, Left) else leaf
