"""What methods of tensors give, of features and heads of which a rank has a part."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence

from tulle.tensor_parallel.dataflow.flow import Flow, Frame
from tulle.tensor_parallel.dataflow.notes import Said
from tulle.tensor_parallel.dataflow.operators import lengths_made
from tulle.tensor_parallel.dataflow.products import PRODUCTS, interleaved, multiplied, softened
from tulle.tensor_parallel.dataflow.shapes import (
    Split,
    argument,
    chunked,
    flat,
    flattened,
    moved,
    of_three,
    said,
    transposed,
    unbound,
    unflattened,
    viewed,
)
from tulle.tensor_parallel.dataflow.stretches import split_along
from tulle.tensor_parallel.dataflow.values import (
    Folded,
    Fused,
    Given,
    Heads,
    Known,
    Length,
    Parts,
    Plain,
    Several,
    Value,
    is_bare,
    is_split,
    shape_of,
)

_METHODS = frozenset(
    [
        *("abs", "bfloat16", "clamp", "clamp_", "clone", "contiguous", "div", "exp", "float", "half", "mul", "relu"),
        *("sigmoid", "square", "tanh", "to", "type_as"),
    ]
)
"""Methods of tensors that treat each number by itself."""
_SIZES = frozenset({"size", "dim", "numel", "stride", "is_floating_point", "is_contiguous", "get_device"})
_OF_LISTS = ("append", "extend", "insert", "pop", "setdefault", "remove", "reverse", "clear", "sort")
DRAWING = ("rand", "bernoulli", "normal", "uniform", "multinomial", "exponential", "poisson", "dropout")
"""How the names of torch's functions begin that draw random numbers."""


def call_of(frame: Frame, value: Value, name: str, arguments: Sequence[Value], keywords: Mapping[str, Value]) -> Value:
    """What a method of a value gives that is no object known."""
    flow, given = frame.flow, flat(arguments)
    everything = [value, *given, *keywords.values()]
    if name in _SIZES:
        return flow.opaque(value) if isinstance(value, Fused) else _size(flow, value, name, given)
    if isinstance(value, Plain) and not all(map(is_bare, everything)):  # an object that may know what is trained
        return flow.opaque(*everything)
    if isinstance(value, Given) and name == "update" and any(map(is_split, given)):  # of a cache
        return Several(tuple(given[:2]))  # what it keeps of keys and values, and these
    if isinstance(value, Parts | Heads | Folded | Fused) and all(map(is_bare, everything[1:])):
        found = _RULES[name](frame, value, *said_in_call(flow, arguments, keywords)) if name in _RULES else None
        return found or (flow.elementwise(value) if name in _METHODS else flow.opaque(*everything))
    if isinstance(value, Parts | Heads | Folded) and name in ("to", "type_as"):
        return flow.elementwise(value)  # as another tensor is
    if (name.endswith("_") or name in _OF_LISTS) and isinstance(value, Given):
        flow.escape(value)  # who gave it sees it changed
    if isinstance(value, Given) and name in _METHODS and all(is_bare(one) for one in everything[1:]):
        return flow.elementwise(value)
    if name in PRODUCTS and len(given) == 1 and not keywords:
        return multiplied(frame, value, given[0])
    if isinstance(value, Heads | Folded) and name in ("masked_fill", "masked_fill_", "add", "where"):
        return flow.elementwise(*everything)
    return flow.pure(*everything, *lengths_made(name, given, keywords.values()), may_draw=name.startswith(DRAWING))


def said_in_call(
    flow: Flow, arguments: Sequence[Value], keywords: Mapping[str, Value]
) -> tuple[list[Said], Mapping[str, Said]]:
    """Arguments, and where the code says them."""
    call = flow.at.node if flow.at is not None else None
    if not isinstance(call, ast.Call):
        return [Said(one) for one in flat(arguments)], {name: Said(one) for name, one in keywords.items()}
    nodes = {one.arg: one.value for one in call.keywords}
    named = {name: said(flow, [one], [nodes[name]])[0] for name, one in keywords.items() if name in nodes}
    return said(flow, arguments, call.args), named


def _size(flow: Flow, value: Value, name: str, given: Sequence[Value]) -> Value:
    """What a method tells of lengths."""
    if not isinstance(value, Parts | Heads | Folded) or name not in ("size", "numel", "stride"):
        return Plain()
    shape, place = shape_of(value), given[0].value if given and isinstance(given[0], Known) else None
    if name == "size" and not given:
        return shape
    if name != "size" or not isinstance(place, int):
        return Length(value.layers)
    items = of_three(flow, shape, place) if isinstance(value, Parts) else shape.items
    return items[place] if -len(items) <= place < len(items) else flow.opaque(value)


def _softened(_: Frame, value: Split, given: Sequence[Said], named: Mapping[str, Said]) -> Value | None:
    return softened(value, argument(given, named, 0, "dim").value)


_RULES = {
    "view": viewed,
    "reshape": viewed,
    "unflatten": unflattened,
    "transpose": transposed,
    "permute": moved,
    "flatten": flattened,
    "unbind": unbound,
    "chunk": chunked,
    "split": split_along,
    "split_with_sizes": split_along,
    "softmax": _softened,
    "repeat_interleave": interleaved,
}
"""What methods give of parts and heads, by their names; None is nothing that is known."""
