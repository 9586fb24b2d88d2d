"""What methods of tensors give, of features and heads of which a rank has a part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tulle.tensor_parallel.dataflow.flow import Attention, Flow, Frame
from tulle.tensor_parallel.dataflow.values import (
    Given,
    Heads,
    Known,
    Length,
    Number,
    Parts,
    Plain,
    Product,
    Several,
    Spread,
    Value,
    is_bare,
    is_split,
    layers_of,
    leaves,
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
        return _size(flow, value, name, given)
    if isinstance(value, Plain) and not all(map(is_bare, everything)):  # an object that may know what is trained
        return flow.opaque(*everything)
    if isinstance(value, Given) and name == "update" and any(map(is_split, given)):  # of a cache
        return Several(tuple(given[:2]))  # what it keeps of keys and values, and these
    if isinstance(value, Parts | Heads) and all(is_bare(one) for one in everything[1:]):
        found = _RULES[name](frame, value, given, keywords) if name in _RULES else None
        return found or (flow.elementwise(value) if name in _METHODS else flow.opaque(*everything))
    if isinstance(value, Parts | Heads) and name in ("to", "type_as"):
        return flow.elementwise(value)  # as another tensor is
    if (name.endswith("_") or name in _OF_LISTS) and isinstance(value, Given):
        flow.escape(value)  # who gave it sees it changed
    if isinstance(value, Given) and name in _METHODS and all(is_bare(one) for one in everything[1:]):
        return flow.elementwise(value)
    if isinstance(value, Heads) and name in ("masked_fill", "masked_fill_", "add", "where"):
        return flow.elementwise(*everything)
    return flow.pure(*everything, may_draw=name.startswith(DRAWING))


def _size(flow: Flow, value: Value, name: str, given: Sequence[Value]) -> Value:
    """What a method tells of lengths."""
    if not isinstance(value, Parts | Heads) or name not in ("size", "numel", "stride"):
        return Plain()
    shape, place = shape_of(value), given[0].value if given and isinstance(given[0], Known) else None
    if name == "size" and not given:
        return shape
    if name != "size" or not isinstance(place, int):
        return Length(value.layers)
    return shape.items[place] if isinstance(value, Heads) else of_three(flow, shape, place)[place]


def of_three(flow: Flow, shape: Several, place: int | slice) -> Sequence[Value]:
    """The lengths of three dimensions, which the features that a layer gives have if more than the first are told."""
    if place not in (0, -1):
        flow.of_three |= layers_of([shape])
    return [Plain(), Plain(), shape.items[-1]]


def multiplied(frame: Frame, left: Value, right: Value) -> Value:
    """The product of matrices, of each head if both have heads."""
    flow = frame.flow
    if not all(isinstance(one, Heads) and one.dim == -3 for one in (left, right)):
        return flow.pure(left, right, may_draw=False)
    layers = [layers_of([one]) for one in (left, right)]
    flow.attentions.append(Attention(frame.module, layers[0], (layers[1], layers[1])))
    return Heads(layers[0] | layers[1], -3)


def _viewed(frame: Frame, value: Parts | Heads, given: Sequence[Value], _: Mapping[str, Value]) -> Value | None:
    """Features seen by heads, `[samples, length, heads, width]`, or heads as features, `[samples, length, features]`.

    One of these is -1, or else an attribute may say how many there are.
    """
    shape = flat(given[0].items if len(given) == 1 and isinstance(given[0], Several) else given)
    if isinstance(value, Heads):
        return _merged(frame, value, shape)
    *outer, count, last = [Plain(), *shape] if len(shape) < 2 else shape
    width = last.value if isinstance(last, Known | Number) else None
    if not isinstance(width, int) or width < 1 or not _is_outer(outer, is_counted=isinstance(count, Number)):
        return None
    if len(outer) == 1:
        frame.flow.of_three |= value.layers
    if isinstance(count, Number):
        frame.flow.count(count, value.layers, is_of_heads=True)
    elif count != Known(-1):
        return None
    for layer in value.layers:
        column = frame.flow.columns[layer]
        if column.width not in (None, width):
            frame.flow.spoil(layer)
        column.width = width
    return Heads(value.layers, -2)


def _merged(frame: Frame, value: Heads, shape: Sequence[Value]) -> Value | None:
    *outer, last = shape or [Plain()]
    widths = {frame.flow.columns[layer].width for layer in value.layers}
    is_of_heads = isinstance(last, Product)
    if isinstance(last, Product):
        first, second = last.factors
        last = first if second.value in widths else second
    is_counted = isinstance(last, Number)
    is_as_before = len(outer) > 1 and outer[-1] == Known(-1) and _is_outer(outer[:-1], is_counted=False)
    if value.dim == -2 and is_as_before and isinstance(last, Known | Number) and widths == {last.value}:
        return value
    if value.dim != -2 or not _is_outer(outer, is_counted=is_counted) or not (is_counted or last == Known(-1)):
        return None
    if isinstance(last, Number):
        frame.flow.count(last, value.layers, is_of_heads=is_of_heads)
    return Parts(value.layers)


def _is_outer(shape: Sequence[Value], *, is_counted: bool) -> bool:
    """Whether lengths are those of samples and of a sequence; one may be -1 where those after are counted."""
    if len(shape) == 1:
        return isinstance(shape[0], Spread)
    return len(shape) == 2 and all(
        isinstance(one, Plain) or (isinstance(one, Known) and (is_counted or one.value != -1)) for one in shape
    )


def _transposed(_: Frame, value: Parts | Heads, given: Sequence[Value], __: Mapping[str, Value]) -> Value | None:
    dims = {one.value for one in given if isinstance(one, Known)}
    if not isinstance(value, Heads) or len(given) != 2:
        return None
    if dims in ({1, 2}, {-3, -2}, {1, -2}, {2, -3}):
        return Heads(value.layers, -5 - value.dim)
    return value if value.dim == -3 and dims in ({2, 3}, {-2, -1}, {2, -1}, {-2, 3}) else None


def _permuted(_: Frame, value: Parts | Heads, given: Sequence[Value], __: Mapping[str, Value]) -> Value | None:
    dims = [one.value for item in given for one in leaves(item) if isinstance(one, Known)]
    return Heads(value.layers, -5 - value.dim) if isinstance(value, Heads) and dims == [0, 2, 1, 3] else None


def _softened(_: Frame, value: Parts | Heads, given: Sequence[Value], keywords: Mapping[str, Value]) -> Value | None:
    dim = keywords.get("dim", given[0] if given else Plain())
    if not isinstance(value, Heads) or dim != Known(-1):
        return None
    return Heads(value.layers, value.dim, is_weights=True)


def _flattened(_: Frame, value: Parts | Heads, given: Sequence[Value], __: Mapping[str, Value]) -> Value | None:
    if not isinstance(value, Heads) or value.dim != -2:
        return None
    return Parts(value.layers) if [*given] in ([Known(2)], [Known(-2)]) else None


def chunked(frame: Frame, value: Parts | Heads, given: Sequence[Value], keywords: Mapping[str, Value]) -> Value | None:
    """The sections of a layer in which several are fused, or of each head of it."""
    count, dim = given[0] if given else Plain(), keywords.get("dim", given[1] if len(given) > 1 else Plain())
    if not _is_last(frame, dim) or not isinstance(count, Known) or len(value.layers) != 1:
        return None
    (layer,) = value.layers
    column = frame.flow.columns[layer]
    if isinstance(value, Heads) and column.fold == 1:
        column.fold = count.value
        return Several((value,) * count.value)
    if not (isinstance(value, Parts) and value.is_fresh):
        return None
    column.sections = count.value
    return Several((Parts(value.layers),) * count.value)


def _is_last(frame: Frame, dim: Value) -> bool:
    """Whether a dimension is the last, as written or as an attribute says, which is watched then."""
    if isinstance(dim, Number) and dim.value == -1:
        frame.flow.decided[dim.owner, dim.name] = -1
    return isinstance(dim, Known | Number) and dim.value == -1


_RULES = {
    "view": _viewed,
    "reshape": _viewed,
    "transpose": _transposed,
    "permute": _permuted,
    "flatten": _flattened,
    "chunk": chunked,
    "softmax": _softened,
}
"""What methods give of parts and heads, by their names; None is nothing that is known."""


def flat(values: Sequence[Value]) -> list[Value]:
    """Values, those within tuples that are unpacked one by one."""
    found: list[Value] = []
    for one in values:
        inner = one.value if isinstance(one, Spread) else None
        found += flat(inner.items) if isinstance(inner, Several) else [one]
    return found
