"""`Group`: layers of a forward that can be split together over some ranks, by what it does with their values."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from tulle.tensor_parallel.dataflow.flow import Flow
from tulle.tensor_parallel.dataflow.notes import Attention, Column, Count, Row
from tulle.tensor_parallel.dataflow.products import GROUPS
from tulle.tensor_parallel.linear import inputs_of, outputs_of

_LENGTHS = ("in_features", "out_features", "nf", "nx")
"""Attributes of linear layers that are a rank's own once they are split."""


@dataclass(frozen=True, slots=True)
class Group:
    """Layers that are split together.

    Args:
        columns: By output features, or by heads.
        rows: By input features.
        attentions: What the heads are for.
        between: Norms and dropouts, and modules without parameters that attend.
        wide: Norms over all features among these.
    """

    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    attentions: tuple[Attention, ...]
    between: tuple[nn.Module, ...]
    wide: tuple[nn.Module, ...]

    @property
    def layers(self) -> list[nn.Module]:
        """All of them."""
        return [*{id(one.linear): one.linear for one in (*self.columns, *self.rows)}.values()]

    @property
    def keys(self) -> set[int]:
        """The layers by identity, and their sections by their keys."""
        return {*map(id, self.layers), *(one.key for one in self.columns)}


def groups(flow: Flow) -> Iterator[Group]:
    """Column layers, and the row layers that take what they give."""
    rest = dict(flow.rows)
    while rest:
        row = rest.pop(next(iter(rest)))
        rows, layers = [row], row.layers
        while more := [key for key, one in rest.items() if one.layers & layers]:
            rows += [rest.pop(key) for key in more]
            layers = union(one.layers for one in rows)
        columns = tuple(column for key, column in flow.columns.items() if key in layers)
        attentions = tuple(one for one in flow.attentions if one.queries & layers)
        between = [*flow.norms.values(), *flow.wide_norms.values(), *flow.dropouts.values()]
        plain = tuple(one for one in flow.frames.values() if next(one.parameters(), None) is None)  # computes alone
        near, wide = (tuple(one for one, of in found if of & layers) for found in (between, flow.wide_norms.values()))
        yield Group(columns, tuple(rows), attentions, (*near, *plain), wide)


def is_of(module: nn.Module, group: Group) -> bool:
    """Whether layers lie in several children of a module: else the child that has them says what becomes of them."""
    own = {id(layer) for layer in group.layers}
    return own <= {id(one) for one in module.modules()} and all(
        not own <= {id(one) for one in child.modules()} for child in _called(module)
    )


def _called(module: nn.Module) -> Iterator[nn.Module]:
    """The children of a module, and of lists among them, which have no forward."""
    for child in module.children():
        yield from _called(child) if isinstance(child, nn.ModuleList | nn.ModuleDict) else [child]


def fits(group: Group, flow: Flow, ranks: int) -> bool:
    """Whether layers can be split together, but for what enters."""
    keys = group.keys
    told = {(id(layer), name) for layer in group.layers for name in _LENGTHS} & {*flow.reads}
    if told:
        return False
    begun = {one.begun for one in (*group.columns, *group.rows)}
    if flow.spoiled & {*keys, *map(id, group.between)} or (keys & flow.drawing and len(begun) > 1):
        return False
    if any(layers & keys and not layers <= keys for _, layers in flow.norms.values()):  # which may not be split
        return False
    if len(group.rows) > len(by_layers(group)):  # each row gives a sum: a layer before three projections, say
        return False
    if not _is_cheaper(group):
        return False
    if not all(_attends(one, flow, ranks) for one in group.attentions):
        return False
    heads = {heads_of(layers, flow) for one in group.attentions for layers in (one.queries, *one.others)}
    if any(layers & keys and lengths & heads for lengths, layers in flow.lengths):  # of each head, perhaps
        return False
    attended = union(layers for one in group.attentions for layers in (one.queries, *one.others))
    narrow = union(layers for one in group.attentions for layers in one.others) - union(
        one.queries for one in group.attentions
    )
    inner = {inputs_of(row.linear) for row in group.rows}
    is_even = {column.features for column in group.columns if column.key not in narrow}
    return (
        attended == {column.key for column in group.columns if column.width}
        and all(column.length % column.fold == 0 for column in group.columns)
        and all(_is_whole(columns, flow) for columns in by_layers(group))
        and is_even == inner
        and len(inner) == 1
        and min(inner) >= ranks
        and all(_says(count, flow) for counts in flow.counts.values() for count in counts if count.layers & keys)
    )


def _is_cheaper(group: Group) -> bool:
    """Whether layers send less together than each for itself: not where a head of few features scores many words.

    A row's sum is twice the numbers of a gather of its outputs; by itself each layer gathers its outputs, and the
    gradient of what goes into a row layer is a sum.
    """
    sums = sum(2 * outputs_of(one.linear) for one in group.rows)
    apart = sum(outputs_of(one.linear) + 2 * inputs_of(one.linear) for one in group.rows)
    return sums <= apart + sum(one.length for one in group.columns)


def by_layers(group: Group) -> list[list[Column]]:
    """The sections of each layer, in order."""
    found: dict[int, list[Column]] = {}
    for column in sorted(group.columns, key=lambda one: one.start):
        found.setdefault(id(column.linear), []).append(column)
    return [*found.values()]


def _is_whole(columns: Sequence[Column], flow: Flow) -> bool:
    """Whether these are all of a layer, which is used nowhere but by its sections, if it has any."""
    key = id(columns[0].linear)
    used = [one.layers for one in flow.rows.values()]
    used += [layers for one in flow.attentions for layers in (one.queries, *one.others)]
    ends = [0, *(one.start + one.length for one in columns)]
    is_used = columns[0].is_section and any(key in layers for layers in used)
    return not is_used and ends[:-1] == [one.start for one in columns] and ends[-1] == flow.columns[key].length


def _says(count: Count, flow: Flow) -> bool:
    """Whether code says how many heads there are, or features in all, as far as that is known."""
    columns = [flow.columns[layer] for layer in count.layers]
    if count.is_of_what_runs:
        return True
    found = {(one.heads, one.features, one.width, one.fold) for one in columns}
    number = {"heads": columns[0].heads, "features": columns[0].features}.get(count.of)  # else it is as it was read
    return len(found) == 1 and (number is None or count.number in (None, number))


def _attends(attention: Attention, flow: Flow, ranks: int) -> bool:
    """Whether heads divide among ranks, and those of keys and values do, or the ranks among them."""
    columns = [[flow.columns[layer] for layer in layers] for layers in (attention.queries, *attention.others)]
    if not all(len({(one.length, one.width) for one in some}) == 1 and some[0].width for some in columns):
        return False
    queries, keys, contents = (heads_of(layers, flow) for layers in (attention.queries, *attention.others))
    if keys != contents or queries % ranks or queries % keys:
        return False
    told = id(attention.module), GROUPS
    is_told = GROUPS in vars(attention.module) and len(flow.repeated.get(told, ())) == flow.reads[told]
    normed = union(layers for _, layers in flow.wide_norms.values())  # of which a rank would have no part
    is_told = is_told and (flow.repeated_otherwise | normed).isdisjoint(attention.others[0] | attention.others[1])
    is_shared = ranks % keys == 0 and is_told and not any(one.is_section for some in columns for one in some)
    return keys % ranks == 0 or is_shared


def heads_of(layers: Collection[int], flow: Flow) -> int:
    """How many heads layers give that give as many."""
    return next(flow.columns[layer] for layer in layers).heads


def union(layers: Iterable[frozenset[int]]) -> frozenset[int]:
    """All of several."""
    return frozenset().union(*layers)
