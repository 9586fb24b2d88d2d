"""What `rearrange` of einops gives of features and heads of which a rank has a part, by its pattern."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tulle.tensor_parallel.dataflow.flow import Flow, Frame
from tulle.tensor_parallel.dataflow.notes import Said
from tulle.tensor_parallel.dataflow.shapes import OUTER, REST, Named, by_heads
from tulle.tensor_parallel.dataflow.values import Folded, Fused, Heads, Known, Parts, Value, is_bare


def rearranged(frame: Frame, value: Value, pattern: Value, named: Named) -> Value | None:
    """What `rearrange` of einops gives: `b n (h d) -> b h n d`, `b n (three h d) -> three b h n d`, and back."""
    text = pattern.value if isinstance(pattern, Known) and isinstance(pattern.value, str) else ""
    left, arrow, right = text.partition("->")
    before, after = (side.replace("(", " ( ").replace(")", " ) ").split() for side in (left, right))
    if not arrow or not all(is_bare(one.value) for one in named.values()):
        return None
    if isinstance(value, Folded) or after[:1] == ["("]:
        return _folded(frame.flow, value, before, after, named)
    if isinstance(value, Parts) and before.count("(") == 1 and before[-1] == ")" and "(" not in after:
        start = before.index("(")
        return _heads_of(frame.flow, value, before[:start], before[start + 1 : -1], after, named)
    if isinstance(value, Heads) and after.count("(") == 1 and after[-1] == ")" and "(" not in before:
        outer, inner = after[: after.index("(")], after[after.index("(") + 1 : -1]
        is_fit = len(before) == 4 and inner == [before[value.dim], before[-1]]
        is_fit = is_fit and outer == [one for one in before if one not in inner]
        heads = named.get(inner[0]) if is_fit else None
        is_said = heads is None or frame.flow.count(heads, value.layers, "heads")
        return Parts(value.layers) if is_fit and is_said else None
    return None


def _folded(flow: Flow, value: Value, before: Sequence[str], after: Sequence[str], named: Named) -> Value | None:
    """Heads in one dimension with samples: `b n (h d) -> (b h) n d`, `b h n d -> (b h) n d`, and back."""
    if isinstance(value, Folded):
        return _apart(flow, value, before, after, named)
    if len(after) != 6 or after[3] != ")":
        return None
    _, b, h, _, n, d = after
    if isinstance(value, Heads):
        is_fit = [*before] in ([b, h, n, d], [b, n, h, d]) and before[value.dim] == h
        is_said = h not in named or flow.count(named[h], value.layers, "heads")
        return Folded(value.layers, -3, value.is_weights) if is_fit and is_said else None
    if not isinstance(value, Parts) or [*before] != [b, n, "(", h, d, ")"]:
        return None
    found = by_heads(flow, value, [named.get(name, Said(REST)) for name in (h, d)])
    flow.of_three |= value.layers
    return None if found is None else Folded(value.layers)


def _apart(flow: Flow, value: Folded, before: Sequence[str], after: Sequence[str], named: Named) -> Value | None:
    if value.dim != -3 or len(before) != 6 or before[0] != "(" or before[3] != ")":
        return None
    _, b, h, _, n, d = before
    if h in named and not flow.count(named[h], value.layers, "heads"):
        return None
    if [*after] == [b, n, "(", h, d, ")"]:
        return Parts(value.layers)
    dims = {f"{b} {h} {n} {d}": -3, f"{b} {n} {h} {d}": -2}
    order = " ".join(after)
    return Heads(value.layers, dims[order], value.is_weights) if order in dims else None


def _heads_of(
    flow: Flow, value: Parts, outer: Sequence[str], inner: Sequence[str], after: Sequence[str], named: Named
) -> Value | None:
    if len(outer) != 2 or len(inner) not in (2, 3) or sorted(after) != sorted([*outer, *inner]):
        return None
    found = by_heads(flow, value, [named.get(name, Said(REST)) for name in inner])
    if found is None:
        return None
    flow.of_three |= value.layers
    letters = dict(zip([*outer, *inner], found.dims if isinstance(found, Fused) else f"{OUTER}hd", strict=True))
    dims = "".join(letters[name] for name in after)
    kept = [name for name in after if name in outer]
    if isinstance(found, Fused):
        return replace(found, dims=dims) if kept == [*outer] else None
    return Heads(value.layers, dims.index("h") - 4) if kept == [*outer] and dims in ("..hd", ".h.d") else None
