"""`Flow`: what a forward does with values that a rank would have a part of, if the layers they come from were split.

Between a column and a row layer nothing may look at more than one feature at a time, and between the projections of
attention at more than one head. Where something does, its layers are spoiled, and each is split for itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any, Protocol

from torch import nn

from tulle.tensor_parallel.dataflow.values import (
    Given,
    Heads,
    Known,
    Number,
    Own,
    Parts,
    Plain,
    Several,
    Spread,
    Value,
    given_by,
    is_bare,
    is_split,
    layers_of,
    leaves,
    trained,
)

Argument = tuple[int, str]
"""An argument of a module's forward, or an attribute: the module by identity, and the name."""


@dataclass(slots=True)
class Column:
    """A linear layer that may be split by output features.

    Args:
        linear: The layer.
        given: The arguments of which its input is made, if it is made of nothing else.
        begun: The number of calls before it.
        width: Of a head, if it gives heads.
        sections: How many of equal lengths are fused in it, one after the other.
        fold: How many are fused in each of its heads.
    """

    linear: nn.Module
    given: Given | None
    begun: int
    width: int | None = None
    sections: int = 1
    fold: int = 1


@dataclass(frozen=True, slots=True)
class Row:
    """A linear layer that takes what column layers give.

    Args:
        linear: The layer.
        layers: The columns, by identity.
        begun: The number of calls before it.
    """

    linear: nn.Module
    layers: frozenset[int]
    begun: int


@dataclass(frozen=True, slots=True)
class Attention:
    """A call of a function that attends.

    Args:
        module: In whose forward.
        queries: The column layers that queries come from, by identity.
        others: Those of keys, and of values.
    """

    module: nn.Module
    queries: frozenset[int]
    others: tuple[frozenset[int], frozenset[int]]


@dataclass(frozen=True, slots=True)
class Count:
    """A place where an attribute says how much there is of split work.

    Args:
        value: Of the attribute.
        read: The how manieth time it is read.
        layers: The column layers that the work comes from.
        is_of_heads: Whether it is a number of heads; else of all their features.
    """

    value: int
    read: int
    layers: frozenset[int]
    is_of_heads: bool


@dataclass(slots=True)
class Flow:
    """What was found in a forward, and in those of modules that it calls."""

    frames: dict[int, nn.Module] = field(default_factory=dict)
    """Whose forwards were followed, by identity."""
    columns: dict[int, Column] = field(default_factory=dict)
    rows: dict[int, Row] = field(default_factory=dict)
    spoiled: set[int] = field(default_factory=set)
    """Layers that cannot be split together with others."""
    taken: dict[Argument, frozenset[int]] = field(default_factory=dict)
    """Arguments that go into column layers, and into which."""
    met: dict[Argument, frozenset[int]] = field(default_factory=dict)
    """Arguments that meet heads, and those of which column layers."""
    masks: dict[Argument, set[int]] = field(default_factory=dict)
    """Those of them that have a dimension of heads, perhaps, and which that is, from the end."""
    otherwise: set[Argument] = field(default_factory=set)
    """Arguments that meet work that every rank does."""
    lengths: list[tuple[frozenset[int], frozenset[int]]] = field(default_factory=list)
    """Lengths of buffers that meet heads, and these heads' layers."""
    of_three: set[int] = field(default_factory=set)
    """Layers whose code is right only if they give three dimensions: samples, a sequence, features."""
    attentions: list[Attention] = field(default_factory=list)
    given_out: dict[int | None, Heads] = field(default_factory=dict)
    """What is attended to, where forward gives it: at which place of a tuple, or all of the result."""
    norms: dict[int, tuple[nn.Module, frozenset[int]]] = field(default_factory=dict)
    """Modules that are applied to each head, and the layers that these come from."""
    dropouts: dict[int, tuple[nn.Module, frozenset[int]]] = field(default_factory=dict)
    """Of features of which a rank has a part."""
    whole_dropouts: set[int] = field(default_factory=set)
    """Those of what is whole, by identity."""
    drawing: set[int] = field(default_factory=set)
    """Layers on whose values some kernel draws random numbers."""
    reads: Counter[Argument] = field(default_factory=Counter)
    """How often numbers that are attributes of modules are read."""
    repeated: dict[Argument, set[int]] = field(default_factory=dict)
    """Where they say how often heads of keys and values are repeated: the how manieth times they are read."""
    counts: dict[Argument, list[Count]] = field(default_factory=dict)
    """Where they say how many heads or features a rank has."""
    decided: dict[Argument, Any] = field(default_factory=dict)
    """Attributes of modules by which the code goes one way or another, and what they are."""
    calls: int = 0
    """How many there were so far that may draw random numbers which all ranks must draw alike."""

    def escape(self, *values: Value) -> None:
        """Values go where all of them is needed."""
        self.spoiled |= layers_of(values)
        for one in (leaf for value in values for leaf in leaves(value)):
            if isinstance(one, Given):
                self.otherwise.update((one.frame, name) for name in one.names)
            if isinstance(one, Own):
                self.spoiled |= one.layers
            for layer in trained(one):
                self.spoil(id(layer))

    def opaque(self, *values: Value, may_draw: bool = True) -> Value:
        """What a call gives of which nothing is known."""
        self.escape(*values)
        is_made = all(is_bare(value) and not trained(value) for value in values)
        self.calls += may_draw or not is_made
        return Given(frozenset(), 0) if is_made else Own()

    def plain(self, *values: Value) -> Value:
        """What is no tensor, of values that are none; of modules among them, nobody knows what becomes."""
        self.escape(*values)
        return Plain()

    def decide(self, *values: Value) -> None:
        """What the code does depends on these, as they are now."""
        self.decided |= {one.read: one.value for one in values if isinstance(one, Known) and one.read is not None}

    def pure(self, *values: Value, may_draw: bool = True) -> Value:
        """What a function without parameters gives."""
        given = given_by(values)
        if given is None or any(map(trained, values)):
            return self.opaque(*values, may_draw=may_draw)
        self.calls += may_draw
        return given

    def count(self, number: Number, layers: frozenset[int], *, is_of_heads: bool) -> None:
        """A number says how much a rank has."""
        self.counts.setdefault((number.owner, number.name), []).append(
            Count(number.value, number.read, layers, is_of_heads)
        )

    def elementwise(self, *values: Value) -> Value:
        """What treats each number by itself, and those of the same place in several."""
        split = [value for value in values if is_split(value)]
        others = [value for value in values if not is_split(value) and not is_bare(value)]
        if not split:
            return _aligned(values) or given_by(values) or (self.opaque(*values) if others else self.plain(*values))
        if all(isinstance(value, Parts) for value in split) and not others:
            return Parts(layers_of(split))
        dims = {value.dim for value in split if isinstance(value, Heads)}
        if not all(isinstance(value, Heads) for value in split) or len(dims) > 1:
            return self.opaque(*values)
        if not self.meets(others, split):
            return self.opaque(*values)
        return Heads(layers_of(split), dims.pop(), all(isinstance(one, Heads) and one.is_weights for one in split))

    def meets(self, others: Sequence[Value], split: Sequence[Value], *, is_aligned: bool = True) -> bool:
        """Have values that are the same for all heads meet these, if they are made of nothing but arguments."""
        found = [one for value in others for one in leaves(value) if not is_bare(one)]
        dims = {value.dim for value in split if isinstance(value, Heads)}
        for one in found:
            if isinstance(one, Given):
                self.lengths.append((one.lengths, layers_of(split)))
                _note(self.met, one, layers_of(split))
                self.escape(*([one] if one.is_within else []))
                for name in one.names if is_aligned and one.is_aligned else ():
                    self.masks.setdefault((one.frame, name), set()).update(dims)
        return all(isinstance(one, Given) for one in found)

    def joined(self, one: Value, other: Value) -> Value:
        """What a value is that is one of two."""
        if one == other:
            return one
        if isinstance(one, Several) and isinstance(other, Several):
            common = min(len(one.items), len(other.items))  # who asks for more knows that there is more
            both = map(self.joined, one.items[:common], other.items[:common])
            return Several((*both, *one.items[common:], *other.items[common:]))
        for first, second in ((one, other), (other, one)):
            if isinstance(first, Known) and first.value is None and not isinstance(second, Known):
                return second
        if is_bare(one) and is_bare(other):
            return self.plain(one, other)
        return self._joined_split(one, other)

    def _joined_split(self, one: Value, other: Value) -> Value:
        layers = layers_of([one, other])
        if isinstance(one, Parts) and isinstance(other, Parts):
            return Parts(layers)
        if isinstance(one, Heads) and isinstance(other, Heads) and one.dim == other.dim:
            return Heads(layers, one.dim, one.is_weights and other.is_weights)
        given = given_by([one, other])
        if given is None:
            self.escape(one, other)
            return Own()
        return given

    def called(self, linear: nn.Module, value: Value) -> Value:
        """What a linear layer gives."""
        key = id(linear)
        if key in self.columns or key in self.rows:
            self.spoil(key)
            return self.opaque(value)
        if isinstance(value, Parts):
            self.rows[key] = Row(linear, value.layers, self.calls)
            return Own()
        if is_split(value) or isinstance(value, Several | Spread):
            return self.opaque(value)
        given = value if isinstance(value, Given) and not value.is_within else None
        self.columns[key] = Column(linear, given, self.calls)
        if given:
            _note(self.taken, given, [key])
        return Parts(frozenset([key]), is_fresh=True)

    def spoil(self, linear: int) -> None:
        """Have a layer, and those that it takes parts of, be split for themselves."""
        self.spoiled.add(linear)
        if linear in self.rows:
            self.spoiled |= self.rows[linear].layers

    def dropped(self, value: Value, dropout: nn.Module | None, *, is_none: bool) -> Value:
        """What dropout leaves of a value: by a module, or by a function, which draws for itself.

        Args:
            value: Of what.
            dropout: The module.
            is_none: Whether nothing is dropped, for now.
        """
        is_again = id(dropout) in self.dropouts or id(dropout) in self.whole_dropouts
        if isinstance(value, Parts) and dropout is not None and not is_again:
            self.dropouts[id(dropout)] = dropout, value.layers
        elif is_none and is_split(value):
            self.decided |= {} if dropout is None else {(id(dropout), "p"): dropout.p}
        else:
            if id(dropout) in self.dropouts:  # it cannot draw the masks of wholes, then, where it is given parts
                self.drawing |= self.dropouts.pop(id(dropout))[1]
            self.drawing |= layers_of([value])
            self.calls += not is_split(value)  # also if nothing is dropped: for now
            self.whole_dropouts.add(id(dropout))
        return self.elementwise(value)


def _aligned(values: Sequence[Value]) -> Given | None:
    """An argument, of which each number was treated by itself."""
    found = [value for value in values if not is_bare(value)]
    is_one = len(found) == 1 and not any(map(trained, values))
    return found[0] if is_one and isinstance(found[0], Given) and found[0].is_aligned else None


def _note(uses: dict[Argument, frozenset[int]], given: Given, layers: Iterable[int]) -> None:
    for argument in ((given.frame, name) for name in given.names):
        uses[argument] = uses.get(argument, frozenset()).union(layers)


class Frame(Protocol):
    """The module whose forward is followed, and what is called in it."""

    module: nn.Module
    flow: Flow

    def method(self, function: FunctionType, arguments: Mapping[str, Value]) -> Value:
        """What a method of the module gives."""
        ...

    def within(self, child: nn.Module, arguments: Mapping[str, Value]) -> Value | None:
        """What the forward of another module gives, or None if it is not looked into."""
        ...
