"""Samples and heads as one dimension, as `bmm` wants them, and apart again; shapes that code compares.

    view(samples * heads, length, width)      of heads, where attention wants them
    view(length, samples * heads, width)      of features, whose samples come second
    view(samples, heads, length, width)       back again

What such a dimension is made of is not to be seen in the code: so `Refolded` looks when it runs, and refuses others.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

from torch import Tensor

from tulle.errors import ModelError
from tulle.tensor_parallel.dataflow.flow import Flow
from tulle.tensor_parallel.dataflow.notes import Count, Said, Site
from tulle.tensor_parallel.dataflow.values import (
    Folded,
    Heads,
    Length,
    Parts,
    Plain,
    Several,
    Spread,
    Value,
    is_bare,
    number_of,
)

Dims = tuple[str, ...]
"""What each dimension is of samples `b`, a sequence `t`, heads `h` and their features `d`; one may be of two."""
_APART = {-3: ("b", "h", "t", "d"), -2: ("t", "b", "h", "d")}
_FOLDED = {-3: ("bh", "t", "d"), -2: ("t", "bh", "d")}
_FEATURES = ("t", "b", "hd")


def refolded(flow: Flow, value: Parts | Heads | Folded, shape: Sequence[Said]) -> Value | None:
    """What a method gives that has samples and heads be one dimension, or two again; None where it does neither."""
    found = _becomes(flow, value, [one.value for one in shape])
    at = flow.at
    if found is None or at is None or not isinstance(at.node, ast.Call) or not isinstance(at.node.func, ast.Attribute):
        return None
    flow.note(Site(at, at.node.func), Count("fold", None, value.layers, dims=(_dims_of(value), _dims_of(found))))
    return found


def _becomes(flow: Flow, value: Parts | Heads | Folded, shape: Sequence[Value]) -> Parts | Heads | Folded | None:
    if not all(is_bare(one) and not isinstance(one, Spread) for one in shape):
        return None
    if isinstance(value, Parts):
        return _of_features(flow, value, shape)
    if isinstance(value, Heads):
        return Folded(value.layers, -3, value.is_weights) if value.dim == -3 and len(shape) == 3 else None
    if len(shape) == 4:
        return Heads(value.layers, value.dim, value.is_weights)
    return Parts(value.layers) if value.dim == -2 and len(shape) == 3 else None


def _of_features(flow: Flow, value: Parts, shape: Sequence[Value]) -> Folded | None:
    """Features by heads, of which the samples are one dimension with these: a product stands in its place."""
    columns = [flow.columns[layer] for layer in value.layers]
    width = number_of(shape[2]) if len(shape) == 3 else None
    is_product = width is not None and isinstance(shape[1], Plain) and shape[1].is_made
    if not is_product or not width or any(one.width not in (None, width) or one.length % width for one in columns):
        return None
    for column in columns:
        column.width = width
    return Folded(value.layers, -2)


def _dims_of(value: Parts | Heads | Folded) -> Dims:
    if isinstance(value, Parts):
        return _FEATURES
    return _APART[value.dim] if isinstance(value, Heads) else _FOLDED[value.dim]


def turned(value: Folded, order: Sequence[int]) -> Folded | None:
    """Its dimensions in another order, of which attention knows two."""
    places = [place % 3 for place in order]
    if sorted(places) != [0, 1, 2]:
        return None
    dim = places.index(value.dim + 3) - 3
    is_known = dim == -3 or places[2] == 2
    return replace(value, dim=dim) if is_known and dim in _FOLDED else None


def asks_shape(node: ast.expr) -> bool:
    """Whether code asks for all lengths of a tensor."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return node.func.attr == "size" and not node.args and not node.keywords
    return isinstance(node, ast.Attribute) and node.attr == "shape"


def compares(flow: Flow, site: Site, shape: Value, other: Value) -> bool:
    """Whether code compares a shape, of which a rank has a part, with numbers: it compares the whole's then."""
    lengths = [one for one in shape.items if isinstance(one, Length)] if isinstance(shape, Several) else []
    if not isinstance(shape, Several) or len(lengths) != 1 or not is_bare(other):
        return False
    place = shape.items.index(lengths[0]) - len(shape.items)
    flow.note(site, Count("shape", None, lengths[0].layers, place=place))
    return True


@dataclass(frozen=True, slots=True)
class Refolded:
    """What a tensor's method becomes that has samples and heads be one dimension, or two again.

    Args:
        label: Whose forward calls it.
        before: What the tensor's dimensions are.
        after: What they are to be.
        whole: How many heads there are.
        own: How many of them this rank has.
    """

    label: str
    before: Dims
    after: Dims
    whole: int
    own: int

    def __call__(self, method: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """The same, which takes the shape of the whole."""
        return partial(self._called, method)

    def _called(self, method: Any, *given: Any) -> Tensor:
        shape = [*given[0]] if len(given) == 1 and not isinstance(given[0], int) else [*given]
        found = [*method.__self__.shape]
        sizes = self._sizes(found) if len(found) == len(self.before) else {}
        whole = [*self._lengths(sizes, self.whole)] if sizes else []
        is_so = len(shape) == len(whole) and all(one in (-1, other) for one, other in zip(shape, whole, strict=True))
        if not is_so or shape.count(-1) > 1:
            raise ModelError(
                f"{self.label} has {found} of each rank be {shape}, where layers that were split together have samples "
                f"and {self.whole} heads be one dimension, or two again ({' '.join(self.before)} -> "
                f"{' '.join(self.after)}): it was understood otherwise; leave it out with select"
            )
        return method(*self._lengths(sizes, self.own))

    def _sizes(self, found: Sequence[int]) -> dict[str, int]:
        """How long each is, of heads apart; empty if a rank has others."""
        sizes: dict[str, int] = {}
        for length, letters in zip(found, self.before, strict=True):
            count = self.own if "h" in letters else 1
            if length % count or (letters == "h" and length != count):
                return {}
            sizes[letters.replace("h", "")] = length // count
        return sizes

    def _lengths(self, sizes: dict[str, int], heads: int) -> Iterator[int]:
        of = sizes | {"h": heads}
        return (prod(of[letter] for letter in letters) for letters in self.after)
