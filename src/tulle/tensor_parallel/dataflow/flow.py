"""`Flow`: what a forward does with values that a rank would have a part of, if the layers they come from were split.

Between a column and a row layer nothing may look at more than one feature at a time, and between the projections of
attention at more than one head. Where something does, its layers are spoiled, and each is split for itself.
"""

from __future__ import annotations

import ast
import inspect
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import FunctionType, ModuleType
from typing import Any, Protocol

from torch import nn

from tulle.tensor_parallel.dataflow.notes import Argument, At, Attention, Column, Count, Reached, Row, Said, Site
from tulle.tensor_parallel.dataflow.values import (
    Folded,
    Fused,
    Given,
    Heads,
    Known,
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
    number_of,
    numbers_in,
    trained,
)
from tulle.tensor_parallel.linear import outputs_of


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
    kept: dict[Argument, Heads] = field(default_factory=dict)
    """The same, where it is kept as an attribute of the module."""
    norms: dict[int, tuple[nn.Module, frozenset[int]]] = field(default_factory=dict)
    """Modules that are applied to each head, or each number, and the layers that these come from."""
    wide_norms: dict[int, tuple[nn.Module, frozenset[int]]] = field(default_factory=dict)
    """Modules that are applied to all features of a layer, and the layer."""
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
    counts: dict[Site, set[Count]] = field(default_factory=dict)
    """Where the code says how many heads or features there are."""
    whole: set[At] = field(default_factory=set)
    """Where it calls something of what is whole."""
    at: At | None = None
    """Where it is followed now."""
    reached: Reached = field(default_factory=dict)
    repeated_otherwise: set[int] = field(default_factory=set)
    """Layers whose heads are repeated as often as something else says."""
    decided: dict[Argument, Any] = field(default_factory=dict)
    """Attributes of modules by which the code goes one way or another, and what they are."""
    owners: dict[int, Any] = field(default_factory=dict)
    """Classes, and modules of Python, that have some of these, by identity."""
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
        if self.at is not None and layers_of(values):
            self.whole.add(self.at)
        is_made = all(is_bare(value) and not trained(value) for value in values)
        self.calls += may_draw or not is_made
        return Given(frozenset(), 0, lengths=numbers_in(values)) if is_made else Own()

    def plain(self, *values: Value) -> Value:
        """What is no tensor, of values that are none; of modules among them, nobody knows what becomes."""
        self.escape(*values)
        is_made = any(isinstance(one, Plain) and one.is_made for one in values)
        return Plain(of=numbers_in(values), is_made=is_made)

    def decide(self, *values: Value) -> None:
        """What the code does depends on these, as they are now."""
        self.decided |= {one.read: one.value for one in values if isinstance(one, Known) and one.read is not None}

    def watched(self, owner: Any, name: str, found: Value) -> Value:
        """What a class, or a module of Python, has by a name: another time it may be something else."""
        if not isinstance(found, Known) or not isinstance(found.value, int | float | str | type(None)):
            return found
        if not isinstance(owner, type | ModuleType):
            return found
        self.owners[id(owner)] = owner
        return Known(found.value, (id(owner), name))

    def pure(self, *values: Value, may_draw: bool = True) -> Value:
        """What a function without parameters gives."""
        given = given_by(values)
        if given is None or any(map(trained, values)):
            return self.opaque(*values, may_draw=may_draw)
        self.calls += may_draw
        return given

    def count(self, said: Said, layers: frozenset[int], of: str, number: int | None = None) -> bool:
        """A number says how much there is, of which a rank has a part; whether it is known where the code has it."""
        if said.site is not None:
            told = number_of(said.value)
            self.note(said.site, Count(of, told if number is None else number, layers, is_rest=told == -1))
        return said.site is not None

    def note(self, site: Site, count: Count) -> None:
        """The code says how much there is of split work, or does something with it, that is a rank's later."""
        self.counts.setdefault(site, set()).add(count)

    def reach(self, module: nn.Module, function: FunctionType, method: FunctionType) -> None:
        """A method of a module is called: as it was written, and as the class has it."""
        at = self.at
        name = (
            at.node.func.attr
            if at and isinstance(at.node, ast.Call) and isinstance(at.node.func, ast.Attribute)
            else ""
        )
        is_named = (
            at is not None and at.owner == id(module) and inspect.getattr_static(type(module), name, None) is function
        )
        self.reached.setdefault((id(module), method), set()).add(at if is_named else None)

    def elementwise(self, *values: Value) -> Value:
        """What treats each number by itself, and those of the same place in several."""
        split = [value for value in values if is_split(value)]
        others = [value for value in values if not is_split(value) and not is_bare(value)]
        if len(split) == 1 and isinstance(split[0], Fused) and not others:
            return split[0]
        if not split:
            return _aligned(values) or given_by(values) or (self.opaque(*values) if others else self.plain(*values))
        if all(isinstance(value, Parts) for value in split) and not others:
            return Parts(layers_of(split))
        first, kinds = split[0], {(type(one), one.dim) for one in split if isinstance(one, Heads | Folded)}
        is_alike = len(kinds) == 1 and all(isinstance(one, Heads | Folded) for one in split)
        if not isinstance(first, Heads | Folded) or not is_alike or not self.meets(others, split):
            return self.opaque(*values)
        are_weights = all(isinstance(one, Heads | Folded) and one.is_weights for one in split)
        return replace(first, layers=layers_of(split), is_weights=are_weights)

    def meets(self, others: Sequence[Value], split: Sequence[Value], *, is_aligned: bool = True) -> bool:
        """Have values that are the same for all heads meet these, if they are made of nothing but arguments."""
        found = [one for value in others for one in leaves(value) if not is_bare(one)]
        dims = {value.dim for value in split if isinstance(value, Heads)}
        for one in found:
            if isinstance(one, Given):
                self.lengths.append((one.lengths, layers_of(split)))
                _note(self.met, one, layers_of(split))
                self.escape(*([one] if one.is_within else []))
                for name in one.names if is_aligned and one.is_aligned and dims else ():
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
        for kind in (Heads, Folded):
            if isinstance(one, kind) and isinstance(other, kind) and one.dim == other.dim:
                return kind(layers, one.dim, one.is_weights and other.is_weights)
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
        self.columns[key] = Column(key, linear, given, self.calls, 0, outputs_of(linear))
        if given:
            _note(self.taken, given, [key])
        return Parts(frozenset([key]), is_fresh=True)

    def section(self, layer: int, start: int, length: int) -> int:
        """The key of some of a layer's features, which are split for themselves."""
        whole = self.columns[layer]
        for column in self.columns.values():
            if column.linear is whole.linear and (column.start, column.length) == (start, length):
                return column.key
        key = -1 - len(self.columns)  # no identity is that
        self.columns[key] = Column(key, whole.linear, whole.given, whole.begun, start, length)
        return key

    def sections(self, layer: int, lengths: Sequence[int]) -> list[int]:
        """The keys of sections that follow each other."""
        return [self.section(layer, sum(lengths[:number]), length) for number, length in enumerate(lengths)]

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

    def function(self, function: Any, given: Sequence[Value], keywords: Mapping[str, Value]) -> Value | None:
        """What a function gives that is no method, or None if it is not looked into."""
        ...

    def within(self, child: nn.Module, arguments: Mapping[str, Value], *, is_bare: bool = False) -> Value | None:
        """What the forward of another module gives, or None if it is not looked into.

        Args:
            child: The module.
            arguments: Of which a rank has parts.
            is_bare: Whether it is given no tensor.
        """
        ...
