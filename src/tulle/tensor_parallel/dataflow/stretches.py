"""Stretches of a sequence, or of samples, of what a rank has a part of: taken, cut, and put one after the other.

    queries[:, :, 1:]                          without what stands before a picture's patches
    queries.split((prefix, patches), dim=-2)   both
    torch.cat((of_text, of_pictures), dim=2)   as queries of one sequence

No head is looked at with another there, whatever the lengths are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tulle.tensor_parallel.dataflow.flow import Flow, Frame
from tulle.tensor_parallel.dataflow.notes import Said
from tulle.tensor_parallel.dataflow.operators import is_stretch
from tulle.tensor_parallel.dataflow.shapes import Split, argument, cut
from tulle.tensor_parallel.dataflow.values import Heads, Known, Parts, Plain, Several, Value

_ALL = slice(None)


def stretch_of(flow: Flow, value: Heads | Parts, place: Value) -> Heads | Parts | None:
    """What an index takes that leaves all heads, or features, where they are; None for others."""
    several = place.items if isinstance(place, Several) else (place,)
    if not all(is_stretch(one) or one == Known(...) for one in several):
        return None
    found = [one.value for one in several if isinstance(one, Known)]
    count, dim = _form(value)
    if ... in found:
        where = found.index(...)
        found[where : where + 1] = [_ALL] * (count - len(found) + 1)
    found += [_ALL] * (count - len(found))
    is_of_three = isinstance(value, Heads) or len(several) == count or _came_by_heads(flow, value)
    if len(found) != count or found[dim] != _ALL or not is_of_three:
        return None
    return _of_form(flow, value)


def split_along(frame: Frame, value: Split, given: Sequence[Said], named: Mapping[str, Said]) -> Value | None:
    """What `split` gives: stretches as many as lengths are told, or sections of features."""
    size, dim = argument(given, named, 0, "split_size", "split_sizes").value, argument(given, named, 1, "dim").value
    if not isinstance(value, Heads | Parts) or not _is_along(value, dim):
        return cut(frame, value, given, named)
    if isinstance(value, Parts) and not _came_by_heads(frame.flow, value):
        return None
    if not isinstance(size, Several) or not all(isinstance(one, Plain | Known) for one in size.items):
        return None
    return Several((_of_form(frame.flow, value),) * len(size.items))


def concatenated(flow: Flow, first: Value, dim: Value) -> Value | None:
    """What `cat` gives of heads: one after the other along any dimension but their own."""
    items = [one for one in first.items if isinstance(one, Heads)] if isinstance(first, Several) else []
    if not isinstance(first, Several) or not items or len(items) < len(first.items):
        return None
    if dim not in (Known(-1), Known(3)) and not all(_is_along(one, dim) for one in items):
        return None
    return flow.elementwise(*items)


def _form(value: Heads | Parts) -> tuple[int, int]:
    """How many dimensions there are, and of which of them a rank has a part."""
    return (4, value.dim) if isinstance(value, Heads) else (3, -1)


def _came_by_heads(flow: Flow, value: Parts) -> bool:
    """Whether features were heads, and so have samples and a sequence before them."""
    return all(flow.columns[layer].width for layer in value.layers)


def _of_form(flow: Flow, value: Heads | Parts) -> Heads | Parts:
    if isinstance(value, Heads):
        return value
    flow.of_three |= value.layers
    return Parts(value.layers)


def _is_along(value: Heads | Parts, dim: Value) -> bool:
    """Whether a dimension is that of samples or a sequence."""
    count, own = _form(value)
    place = dim.value if isinstance(dim, Known) else None
    if not isinstance(place, int) or not -count <= place < count:
        return False
    return place % count not in (own % count, count - 1)
