"""What is known of features of which a rank has a part when their shape changes: seen by heads, cut, put together.

    view(*shape, heads, width)        features of a layer by heads, and heads as features
    view(*shape, 3, heads, width)     queries, keys and values that one layer gives
    split(features, dim=-1)           the same, one after the other

Where the code says how many heads or features there are, by an attribute of a module, say, that place is noted: it
says a rank's number once the layers are split (`rewriting`).
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import replace

from tulle.tensor_parallel.dataflow.flow import Flow, Frame
from tulle.tensor_parallel.dataflow.folds import refolded, turned
from tulle.tensor_parallel.dataflow.notes import At, Column, Said, Site
from tulle.tensor_parallel.dataflow.values import (
    Folded,
    Fused,
    Heads,
    Known,
    Number,
    Parts,
    Plain,
    Several,
    Spread,
    Value,
    layers_of,
    number_of,
)

Split = Parts | Heads | Folded | Fused
Named = Mapping[str, Said]
REST = Known(-1)
"""What a shape says where the length is what is left."""
OUTER = ".."
"""The dimensions of samples and of a sequence."""


def flat(values: Sequence[Value]) -> list[Value]:
    """Values, those within tuples that are unpacked one by one."""
    found: list[Value] = []
    for one in values:
        inner = one.value if isinstance(one, Spread) else None
        found += flat(inner.items) if isinstance(inner, Several) else [one]
    return found


def said(flow: Flow, values: Sequence[Value], nodes: Sequence[ast.expr]) -> list[Said]:
    """Arguments, those that are unpacked one by one, and where the code says each."""
    if flow.at is None or len(values) != len(nodes):
        return [Said(one) for one in flat(values)]
    return [one for value, node in zip(values, nodes, strict=True) for one in _said(value, node, flow.at)]


def _said(value: Value, node: ast.expr, at: At) -> list[Said]:
    if not isinstance(value, Spread):
        return [Said(value, Site(at, node))]
    if isinstance(value.value, Several) and isinstance(node, ast.Starred):
        return _items(value.value, node.value, at)
    return [Said(one) for one in flat([value])]


def _items(several: Several, node: ast.expr, at: At) -> list[Said]:
    """What is in a tuple, or a list, where the code has it: written out, or by the name of all."""
    if isinstance(node, ast.Tuple | ast.List) and len(node.elts) == len(several.items):
        both = zip(several.items, node.elts, strict=True)
        return [one for item, element in both for one in _said(item, element, at)]
    items = flat(several.items)
    spread = [number for number, one in enumerate(items) if isinstance(one, Spread)]
    first = spread[-1] + 1 if spread else 0  # what comes before is at a place that nobody knows
    return [
        Said(one, Site(at, node, number - len(items)) if number >= first else None) for number, one in enumerate(items)
    ]


def _lengths(given: Sequence[Said]) -> list[Said]:
    """Those of a shape, given one by one or as a tuple."""
    if len(given) == 1 and isinstance(several := given[0].value, Several):
        site = given[0].site
        return [Said(one) for one in flat(several.items)] if site is None else _items(several, site.node, site.at)
    return [*given]


def of_three(flow: Flow, shape: Several, place: int | slice) -> Sequence[Value]:
    """The lengths of three dimensions, which the features that a layer gives have if more than the first are told."""
    if place not in (0, -1):
        flow.of_three |= layers_of([shape])
    return [Plain(), Plain(), shape.items[-1]]


def viewed(frame: Frame, value: Split, given: Sequence[Said], named: Named, *, is_method: bool = True) -> Value | None:
    """Features seen by heads, `[samples, length, heads, width]`, or heads as features, `[samples, length, features]`.

    One of these is -1, or else the code says how many there are.
    """
    shape = _lengths(given)
    if named or not shape or isinstance(value, Fused):
        return None
    if is_method and (found := refolded(frame.flow, value, shape)) is not None:
        return found
    if isinstance(value, Folded):
        return None
    if isinstance(value, Heads):
        return _merged(frame.flow, value, shape)
    count = 1 if isinstance(shape[0].value, Spread) else 2
    outer, inner = shape[:count], shape[count:]
    if not _is_outer(outer, is_counted=all(one.value != REST for one in inner)):
        return None
    found = by_heads(frame.flow, value, inner, is_made=any(_is_made(one.value) for one in outer))
    if found is not None and count == 1:
        frame.flow.of_three |= value.layers
    return found


def unflattened(frame: Frame, value: Split, given: Sequence[Said], named: Named) -> Value | None:
    """The same, of which only what becomes of the last dimension is said."""
    if not isinstance(value, Parts) or named or len(given) != 2 or not _is_last(frame.flow, value, given[0].value):
        return None
    frame.flow.of_three |= value.layers
    return by_heads(frame.flow, value, _lengths(given[1:]))


def by_heads(flow: Flow, value: Parts, inner: Sequence[Said], *, is_made: bool = False) -> Value | None:
    """Features by heads, or by heads and what is fused in the layer.

    Args:
        flow: Of what.
        value: The features.
        inner: How many there are of each.
        is_made: Whether lengths before may be others, of which -1 here would make up for.
    """
    columns = [flow.columns[layer] for layer in value.layers]
    features = {column.features for column in columns}
    if len(inner) == 2 and len(features) == 1:
        width = _width(flow, value.layers, features.pop(), *inner, is_made=is_made)
        if width is None:
            return None
        for layer, column in zip(value.layers, columns, strict=True):
            if column.width not in (None, width):
                flow.spoil(layer)
            column.width = width
        return Heads(value.layers, -2)
    return _fused(flow, value, columns[0], inner, is_made=is_made) if len(inner) == 3 and value.is_fresh else None


def _fused(flow: Flow, value: Parts, column: Column, inner: Sequence[Said], *, is_made: bool) -> Fused | None:
    """Features of a layer by what is fused in it and heads, or by heads and what is fused in each."""
    first, second, last = inner
    for is_first, fused, heads in ((True, first, second), (False, second, first)):
        parts = fused.value.value if isinstance(fused.value, Known) else None
        if not isinstance(parts, int) or parts < 2 or column.length % parts:
            continue
        each = column.length // parts
        of = flow.sections(column.key, [each] * parts) if is_first else [column.key] * parts
        width = _width(flow, frozenset(of), each, heads, last, is_made=is_made)
        if width is None:
            return None
        for key in of:
            flow.columns[key].width = width if is_first else parts * width
            flow.columns[key].fold = 1 if is_first else parts
        return Fused(value.layers | {*of}, f"{OUTER}{'sh' if is_first else 'hs'}d", tuple(of))
    return None


def _width(flow: Flow, layers: frozenset[int], features: int, count: Said, width: Said, *, is_made: bool) -> int | None:
    """Of a head, where so many features are seen by so many heads of some width; None if that cannot be."""
    heads, own = (None if one.value == REST else number_of(one.value) for one in (count, width))
    if not all(isinstance(one.value, Known | Number | Plain) for one in (count, width)):
        return None
    if heads is None and own is None:
        return None
    heads = heads or features // max(own or 1, 1)
    found = features // max(heads, 1)
    if own not in (None, found) or found < 1 or heads * found != features:
        return None
    if (count.value != REST or is_made) and not flow.count(count, layers, "heads", heads):
        return None
    if own is None and (width.value != REST or is_made) and not flow.count(width, layers, "width", found):
        return None
    return found


def _is_made(value: Value) -> bool:
    """Whether a length is none that something has, as far as is known."""
    return isinstance(value, Known) or (isinstance(value, Plain) and value.is_made)


def _merged(flow: Flow, value: Heads, shape: Sequence[Said]) -> Value | None:
    """Heads as features; or as they are, where their number is what is left."""
    *outer, last = shape
    columns = [flow.columns[layer] for layer in value.layers]
    is_as_before = len(outer) > 1 and outer[-1].value == REST and _is_outer(outer[:-1], is_counted=False)
    is_as_before = is_as_before and not any(_is_made(one.value) for one in outer[:-1])
    if value.dim == -2 and is_as_before and {number_of(last.value)} == {column.head_width for column in columns}:
        return value
    is_counted = last.value != REST
    is_told = all(isinstance(one.value, Spread) or _is_length(one.value, is_counted=is_counted) for one in outer)
    if value.dim != -2 or not outer or not is_told:
        return None
    if is_counted and not _is_counted(flow, value, last, {column.features for column in columns}):
        return None
    return Parts(value.layers)


def _is_counted(flow: Flow, value: Heads, last: Said, features: set[int]) -> bool:
    """Whether code may say that so many features are those of all heads."""
    is_number = isinstance(last.value, Known | Number | Plain) and len(features) == 1
    return is_number and number_of(last.value) in (None, *features) and flow.count(last, value.layers, "features")


def _is_outer(shape: Sequence[Said], *, is_counted: bool) -> bool:
    """Whether lengths are those of samples and of a sequence; one may be -1 where those after are counted."""
    if len(shape) == 1:
        return isinstance(shape[0].value, Spread)
    return len(shape) == 2 and all(_is_length(one.value, is_counted=is_counted) for one in shape)


def _is_length(value: Value, *, is_counted: bool) -> bool:
    """Whether a value is a length, or -1 where those after are counted."""
    return isinstance(value, Plain) or (isinstance(value, Known) and (is_counted or value != REST))


def chunked(frame: Frame, value: Split, given: Sequence[Said], named: Named) -> Value | None:
    """The sections of a layer in which several are fused, or of each head of it."""
    count, dim = argument(given, {}, 0).value, argument(given, named, 1, "dim").value
    if not isinstance(count, Known) or not isinstance(value, Parts | Heads) or not _is_last(frame.flow, value, dim):
        return None
    if len(value.layers) != 1 or not isinstance(count.value, int) or count.value < 1:
        return None
    column = frame.flow.columns[next(iter(value.layers))]
    whole = column.length if isinstance(value, Parts) else column.width or 0
    return None if whole % count.value else _sections(frame.flow, value, [whole // count.value] * count.value)


def cut(frame: Frame, value: Split, given: Sequence[Said], named: Named) -> Value | None:
    """The same, told by the lengths of the sections."""
    size = argument(given, named, 0, "split_size", "split_size_or_sections")
    dim = argument(given, named, 1, "dim").value
    if not isinstance(value, Parts | Heads) or not _is_last(frame.flow, value, dim):
        return None
    flow, several = frame.flow, isinstance(size.value, Several)
    lengths = _lengths([size]) if several else [size]
    numbers = [number for one in lengths if (number := number_of(one.value)) and number > 0]
    if len(value.layers) != 1 or len(numbers) != len(lengths):
        return None
    column = flow.columns[next(iter(value.layers))]
    whole = column.length if isinstance(value, Parts) else column.width or 0
    if not several:
        numbers = numbers * (whole // numbers[0])
    if sum(numbers) != whole or (isinstance(value, Heads) and len({*numbers}) > 1):
        return None
    found = _sections(flow, value, numbers)
    if found is None or isinstance(value, Heads):
        return found
    keys = [layers_of([one]) for one in found.items]
    said = zip(lengths, keys if several else [layers_of([found])], strict=True)
    return found if all([flow.count(one, layers, "features") for one, layers in said]) else None


def _sections(flow: Flow, value: Parts | Heads, lengths: Sequence[int]) -> Several | None:
    """Some sections along the last dimension: of a layer, or of each of its heads."""
    if len(value.layers) != 1:
        return None
    column = flow.columns[next(iter(value.layers))]
    if isinstance(value, Heads) and column.fold == 1:
        column.fold = len(lengths)
        return Several((value,) * len(lengths))
    if not (isinstance(value, Parts) and value.is_fresh) or column.width:
        return None
    return Several(tuple(Parts(frozenset([key])) for key in flow.sections(column.key, lengths)))


def stretch(flow: Flow, value: Parts, bounds: tuple[Said, Said]) -> Parts | None:
    """Some features of a layer, from one on to before another."""
    (key,) = value.layers if len(value.layers) == 1 else (0,)
    column = flow.columns.get(key)
    numbers = [number_of(one.value) for one in bounds]
    is_told = all(number is not None or one.value == Known(None) for number, one in zip(numbers, bounds, strict=True))
    if column is None or not value.is_fresh or column.width or not is_told:
        return None
    first, last = numbers[0] or 0, column.length if numbers[1] is None else numbers[1]
    if not 0 <= first < last <= column.length:
        return None
    section = frozenset([flow.section(key, first, last - first)])
    said = [one for one, number in zip(bounds, numbers, strict=True) if number]
    return Parts(section) if all([flow.count(one, section, "end") for one in said]) else None


def argument(given: Sequence[Said], named: Named, place: int, *names: str) -> Said:
    """An argument at a place, or by the first of some names by which it is there; one of which nothing is known."""
    if len(given) > place:
        return given[place]
    return next((named[name] for name in names if name in named), Said(Plain()))


def _is_last(flow: Flow, value: Parts | Heads, dim: Value) -> bool:
    """Whether a dimension is the last, as written or as an attribute says, which is watched then."""
    if isinstance(dim, Known) and dim.value == 2 and isinstance(value, Parts):
        flow.of_three |= value.layers
        return True
    if isinstance(dim, Number) and dim.value == -1:
        flow.decided[dim.owner, dim.name] = -1
    return isinstance(dim, Known | Number) and dim.value == -1


def moved(_: Frame, value: Split, given: Sequence[Said], named: Named) -> Value | None:
    """Dimensions in another order."""
    found = [number_of(one.value) for one in _lengths(given)]
    dims = [one for one in found if one is not None]
    if named or len(dims) != len(found):
        return None
    if isinstance(value, Folded):
        return turned(value, dims)
    if isinstance(value, Fused):
        places = [dim % len(value.dims) for dim in dims]
        is_order = sorted(places) == [*range(len(value.dims))]
        return replace(value, dims="".join(value.dims[place] for place in places)) if is_order else None
    return Heads(value.layers, -5 - value.dim) if isinstance(value, Heads) and dims == [0, 2, 1, 3] else None


def transposed(_: Frame, value: Split, given: Sequence[Said], named: Named) -> Value | None:
    """Two dimensions, one in the place of the other."""
    found = [one.value.value for one in given if isinstance(one.value, Known)]
    dims = {*found}
    if named or len(found) != 2 or len(given) != 2 or isinstance(value, Parts):
        return None
    if isinstance(value, Folded):
        order = [0, 1, 2]
        order[found[0]], order[found[1]] = order[found[1]], order[found[0]]
        return turned(value, order)
    if isinstance(value, Fused):
        letters, (one, other) = [*value.dims], found
        letters[one], letters[other] = letters[other], letters[one]
        return replace(value, dims="".join(letters))
    if dims in ({1, 2}, {-3, -2}, {1, -2}, {2, -3}):
        return Heads(value.layers, -5 - value.dim)
    return value if value.dim == -3 and dims in ({2, 3}, {-2, -1}, {2, -1}, {-2, 3}) else None


def flattened(_: Frame, value: Split, given: Sequence[Said], __: Named) -> Value | None:
    """Heads as features."""
    if not isinstance(value, Heads) or value.dim != -2:
        return None
    return Parts(value.layers) if [one.value for one in given] in ([Known(2)], [Known(-2)]) else None


def unbound(_: Frame, value: Split, given: Sequence[Said], named: Named) -> Value | None:
    """What is fused in a layer, one by one."""
    dim = (given[0] if given else named.get("dim", Said(Known(0)))).value
    place = number_of(dim)
    if not isinstance(value, Fused) or not isinstance(dim, Known) or place is None:
        return None
    return unpacked(value, place)


def unpacked(value: Fused, place: int = 0) -> Several | None:
    """What is fused in a layer, if a dimension goes over it."""
    rest = value.dims.replace("s", "")
    if value.dims[place : place + 1 or None] != "s" or rest[-1] != "d" or rest.index("h") not in (1, 2):
        return None
    return Several(tuple(Heads(frozenset([key]), rest.index("h") - len(rest)) for key in value.of))


def taken(value: Fused, place: Value) -> Value | None:
    """One of what is fused in a layer, by an index along its dimension alone."""
    several = [*place.items] if isinstance(place, Several) else [place]
    if not all(isinstance(one, Known) for one in several):
        return None
    places = [one.value for one in several if isinstance(one, Known)]
    if ... in places:
        missing = len(value.dims) - len(places) + 1
        where = places.index(...)
        places[where : where + 1] = [slice(None)] * missing
    numbers = [number for number, one in enumerate(places) if one != slice(None)]
    if len(numbers) != 1 or not isinstance(places[numbers[0]], int):
        return None
    items = unpacked(value, numbers[0])
    inside = items is not None and -len(items.items) <= places[numbers[0]] < len(items.items)
    return items.items[places[numbers[0]]] if items is not None and inside else None
