"""What is noted of a forward: layers that may be split together, attention, and where code says how much there is."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from torch import nn

from tulle.tensor_parallel.dataflow.values import Given, Value

Argument = tuple[int, str]
"""An argument of a module's forward, or an attribute: the module by identity, and the name."""


@dataclass(slots=True)
class Column:
    """A linear layer that may be split by output features, or one of several sections of one.

    Args:
        key: By which it is known: the layer's identity, or a number of a section, below 0.
        linear: The layer.
        given: The arguments of which its input is made, if it is made of nothing else.
        begun: The number of calls before it.
        start: Its first feature in the layer.
        length: How many features it has.
        width: Of a head, with all that is fused in it, if it gives heads.
        fold: How many are fused in each of its heads.
    """

    key: int
    linear: nn.Module
    given: Given | None
    begun: int
    start: int
    length: int
    width: int | None = None
    fold: int = 1

    @property
    def is_section(self) -> bool:
        """Whether the layer has others."""
        return self.key != id(self.linear)

    @property
    def features(self) -> int:
        """How many features each has that is fused in it."""
        return self.length // self.fold

    @property
    def heads(self) -> int:
        """How many heads it has."""
        return self.length // (self.width or 1)

    @property
    def head_width(self) -> int:
        """How many features a head has of one of what is fused; 0 if it gives no heads."""
        return (self.width or 0) // self.fold


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
class At:
    """Where in the code something is called, an item is taken, a shape is asked for, or values meet.

    Args:
        owner: The module whose method it is in, by identity.
        function: The method, as it was written.
        node: The call, the item, the shape, or the operation.
    """

    owner: int
    function: Any  # a FunctionType, which the checker of types would bind
    node: ast.AST


Reached = dict[tuple[int, FunctionType], set[At | None]]
"""From where methods of modules are called, by the module's identity and as they were written; None if by no name."""


@dataclass(frozen=True, slots=True)
class Site:
    """A place in the code where a number says how much there is of split work.

    Args:
        at: Of what is called with it.
        node: What says it.
        place: Where it is, from the end, in the tuple that this is; None if it is the number.
    """

    at: At
    node: ast.expr
    place: int | None = None


@dataclass(frozen=True, slots=True)
class Count:
    """What such a number is.

    Args:
        of: "heads", "features" of all of them, "width" of one, or the "end" of a section; "fold" where samples and
            heads become one dimension, or two, "shape" where one is compared, and "enter" where something meets heads.
        number: As it is now, or must be; None if nobody knows before the forward runs.
        layers: The column layers that the work comes from.
        is_rest: Whether the code says -1 for it.
        dims: Of a fold: what each dimension is, before and afterwards.
        place: Of a shape, or of what enters: the dimension of which a rank has a part, from the end.
    """

    of: str
    number: int | None
    layers: frozenset[int]
    is_rest: bool = False
    dims: tuple[tuple[str, ...], ...] = ()
    place: int | None = None

    @property
    def is_of_what_runs(self) -> bool:
        """Whether what is said there becomes what looks at a tensor, or a shape, when the code runs: no number."""
        return bool(self.dims) or self.place is not None


@dataclass(frozen=True, slots=True)
class Said:
    """An argument, and where the code says it, if that is known."""

    value: Value
    site: Site | None = None
