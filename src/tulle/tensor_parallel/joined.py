"""Layers of classes that nobody knows, which are split together where the code around them shows that they can be.

    up, activation, down                     column, row: one sum of activations each way
    queries, keys, values, attend, output    column, row, by heads

Each for itself, such layers would each gather what they give; together nothing travels between them. Source: Shoeybi
et al., *Megatron-LM* (2019), section 3; what a module computes is known by `forward.follow`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from torch import nn

from tulle.tensor_parallel.dataflow.flow import Flow
from tulle.tensor_parallel.dataflow.forward import follow, holds_linear
from tulle.tensor_parallel.dataflow.notes import Argument, Attention, Column, Count, Row, Site
from tulle.tensor_parallel.dataflow.products import GROUPS
from tulle.tensor_parallel.dataflow.rewriting import Counted, Rewriting
from tulle.tensor_parallel.dropout import draw_apart
from tulle.tensor_parallel.linear import is_transposed
from tulle.tensor_parallel.placement import length_on
from tulle.tensor_parallel.region import Gathered, OfHeads, Region, enter_within
from tulle.tensor_parallel.splitter import Splitter
from tulle.tensor_parallel.told import OfThree, Told, Watch, tell_within

_LENGTHS = ("in_features", "out_features", "nf", "nx")
"""Attributes of linear layers that are a rank's own once they are split."""


@dataclass(frozen=True, slots=True)
class Group:
    """Layers that are split together.

    Args:
        columns: By output features, or by heads.
        rows: By input features.
        attentions: What the heads are for.
        between: Norms and dropouts.
    """

    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    attentions: tuple[Attention, ...]
    between: tuple[nn.Module, ...]

    @property
    def layers(self) -> list[nn.Module]:
        """All of them."""
        return [*{id(one.linear): one.linear for one in (*self.columns, *self.rows)}.values()]

    @property
    def keys(self) -> set[int]:
        """The layers by identity, and their sections by their keys."""
        return {*map(id, self.layers), *(one.key for one in self.columns)}


@dataclass(slots=True)
class Joined:
    """What is split together in a module, and near in it.

    Args:
        module: The module.
        ranks: Over how many.
        flow: What its forward does.
        groups: Of layers.
    """

    module: nn.Module
    ranks: int
    flow: Flow
    groups: list[Group]
    _otherwise: set[Argument] = field(default_factory=set)
    """Arguments that meet work that every rank does, or enter a layer by itself."""

    def __post_init__(self) -> None:
        """Leave out what cannot enter."""
        count = -1
        while count != len(self.groups):
            count = len(self.groups)
            self._find_otherwise()
            self.groups = [group for group in self.groups if self._enters(group)]

    def split(self, to: Splitter, name_of: Callable[[nn.Module], str]) -> None:
        """Split the layers.

        Args:
            to: Of the module.
            name_of: The name of a module in it.
        """
        self._rewrite(to.axis.rank, name_of)
        for key, frame in self.flow.frames.items():
            region = to.within(name_of(frame)).region
            names = [name for name in _named_arguments(frame) if self._is_entered((key, name))]  # alike on all ranks
            regions = {name: self._region((key, name), region) for name in names}
            if regions:
                enter_within(frame, regions)
        owners = {id(one): one for one in self.module.modules()}
        told = tuple(self._told())
        for group in self.groups:
            self._split(group, to, name_of)
            for layer in group.layers if group.keys & self.flow.of_three else ():
                if id(layer) in self.flow.of_three:
                    layer.register_forward_hook(OfThree(name_of(layer)))
        for place, weights in self.flow.given_out.items():
            if weights.layers & self.keys:
                whole = Gathered(to.within(name_of(self.module)).region, place, weights.dim)
                self.module.register_forward_hook(whole)
        if told:
            tell_within(self.module, told)
        decided = tuple((owners[key], name, value) for (key, name), value in self.flow.decided.items() if key in owners)
        if decided:
            self.module.register_forward_pre_hook(Watch(name_of(self.module), decided))

    def _told(self) -> Iterator[Told]:
        """What attributes are to say within forward, of one rank's."""
        for attention in (one for group in self.groups for one in group.attentions):
            if self._shared(attention):
                yield attention.module, GROUPS, _heads(attention.queries, self.flow) // self.ranks

    def _rewritings(self, keys: set[int]) -> Iterator[tuple[nn.Module, Rewriting, list[Site]]]:
        """Modules whose code says how much there is of some layers' work, and where."""
        said = [site for site, counts in self.flow.counts.items() if any(one.layers & keys for one in counts)]
        for key in dict.fromkeys(site.at.owner for site in said):
            module = self.flow.frames[key]
            sites = [site for site in said if site.at.owner == key]
            yield module, Rewriting(module, self.flow, sites), sites

    def _own(self, site: Site, rank: int) -> dict[int, set[int]]:
        """What numbers that are said in a place become on a rank."""
        shared = _union(self._shared(one) for group in self.groups for one in group.attentions)
        found: dict[int, set[int]] = {}
        for count in self.flow.counts[site]:
            column = self.flow.columns[next(iter(count.layers))]
            whole, own = column.features, self._features(column, shared, rank)
            if count.of == "heads":
                whole, own = column.heads, 1 if count.layers <= shared else column.heads // self.ranks
            elif count.of == "width":
                whole = own = column.head_width
            elif count.of == "end":
                whole = count.number or 0
                others = (one for one in self.flow.columns.values() if one.linear is column.linear and one.is_section)
                own = sum(self._features(one, shared, rank) for one in others if one.start + one.length <= whole)
            found.setdefault(whole, set()).add(own)
        return found

    def _features(self, column: Column, shared: Collection[int], rank: int) -> int:
        """How many features a rank has of each that is fused in a layer, or in a section."""
        if not column.width:
            return length_on(rank, column.features, self.ranks)
        return column.head_width * (1 if column.key in shared else column.heads // self.ranks)

    def _rewrite(self, rank: int, name_of: Callable[[nn.Module], str]) -> None:
        """Have the code say a rank's numbers."""
        for module, rewriting, sites in self._rewritings(self.keys):
            is_possible = rewriting.is_possible()
            assert is_possible, "else its layers are left out"
            own = [tuple((whole, min(of)) for whole, of in self._own(site, rank).items()) for site in sites]
            counts = zip(own, sites, strict=True)
            rewriting.apply([Counted(name_of(module), numbers, site.place) for numbers, site in counts])

    def _split(self, group: Group, to: Splitter, name_of: Callable[[nn.Module], str]) -> None:
        inner = _inputs(group.rows[0].linear)
        shared = [self._shared(one) for one in group.attentions]
        for attention, layers in zip(group.attentions, shared, strict=True):
            self._split_shared(attention, layers, to, name_of)
        for columns in _by_layers(group):
            if columns[0].key not in _union(shared):
                self._split_columns(columns, to.within(name_of(columns[0].linear)))
        for row in group.rows:
            to.within(name_of(row.linear)).row(row.linear)
        for norm, layers in self.flow.norms.values():
            if layers & group.keys:
                to.within(name_of(norm)).summed(norm)
        for dropout, layers in self.flow.dropouts.values():
            if layers & group.keys:
                to.within(name_of(dropout)).hidden_dropout(dropout, inner)
        if group.keys & self.flow.drawing:
            columns, rows = ([one.linear for one in some] for some in (group.columns, group.rows))
            draw_apart(self.module, columns, rows, to.within(name_of(columns[0])).region, is_always=True)

    def _split_columns(self, columns: Sequence[Column], to: Splitter) -> None:
        """Split a layer of which these are the sections, or which is one."""
        linear, sections = columns[0].linear, [one.length for one in columns]
        if self._enters_alone(columns[0]):
            to.column_alone(linear, sections=sections, gather=False)
        else:
            to.column(linear, sections=sections)

    def _split_shared(
        self, attention: Attention, shared: Collection[int], to: Splitter, name_of: Callable[[nn.Module], str]
    ) -> None:
        """Have each rank use the head of keys and values that its queries need, where there are fewer than ranks."""
        if not shared:
            return
        queries, pairs = (_heads(layers, self.flow) for layers in (attention.queries, attention.others[0]))
        first = to.shared_head(queries, pairs)
        for column in (self.flow.columns[layer] for layer in shared):
            width = column.width or 0
            to.within(name_of(column.linear)).shared_rows(column.linear, slice(first * width, (first + 1) * width))

    def _shared(self, attention: Attention) -> frozenset[int]:
        """Layers of keys and values that stay whole on every rank."""
        layers = attention.others[0] | attention.others[1]
        return layers if _heads(attention.others[0], self.flow) % self.ranks else frozenset()

    def _region(self, argument: Argument, region: Region) -> Region:
        counts = {
            _heads(one.queries, self.flow)
            for group in self.groups
            for one in group.attentions
            if argument in self.flow.masks and self.flow.met[argument] & one.queries
        }
        if not counts:
            return region
        return OfHeads(region.axis, region.label, heads=counts.pop(), dim=min(self.flow.masks[argument]))

    def _find_otherwise(self) -> None:
        """Find arguments that cannot enter once for all that is split: what else takes them adds its gradient."""
        kept = self.keys
        uses = [*self.flow.taken.items(), *self.flow.met.items()]
        self._otherwise = self.flow.otherwise | {argument for argument, layers in uses if not layers <= kept}
        count = -1
        while count != len(self._otherwise):
            count = len(self._otherwise)
            for column in (one for group in self.groups for one in group.columns if self._enters_alone(one)):
                if column.given is not None:
                    self._otherwise |= {(column.given.frame, name) for name in column.given.names}

    def _enters_alone(self, column: Column) -> bool:
        """Whether the layer itself has its input enter, as the module around it cannot."""
        given = column.given
        return given is None or any(
            (given.frame, name) in self._otherwise or name not in _named_arguments(self.flow.frames[given.frame])
            for name in given.names
        )

    def _is_entered(self, argument: Argument) -> bool:
        layers = self.flow.taken.get(argument, frozenset()) | self.flow.met.get(argument, frozenset())
        return argument not in self._otherwise and bool(layers & self.keys)

    def _enters(self, group: Group) -> bool:
        """Whether all that meets the layers' work can enter before."""
        keys = group.keys
        is_met = any(
            layers & keys and (argument in self._otherwise or len(self.flow.masks.get(argument, ())) > 1)
            for argument, layers in self.flow.met.items()
        )
        shared = _union(map(self._shared, group.attentions))
        alone = [one for one in group.columns if self._enters_alone(one)]
        return self._is_said(keys) and not is_met and not any(one.key in shared for one in alone)

    def _is_said(self, keys: set[int]) -> bool:
        """Whether the code says how much there is of some layers' work where a rank's number can be said instead."""
        kept, flow = self.keys, self.flow
        return all(
            rewriting.is_possible()
            and flow.whole.isdisjoint(site.at for site in sites)
            and all(count.layers <= kept for site in sites for count in flow.counts[site])
            and all(len(own) == 1 for site in sites for own in self._own(site, 0).values())
            for _, rewriting, sites in self._rewritings(keys)
        )

    @property
    def layers(self) -> list[nn.Module]:
        """All of them."""
        return [layer for group in self.groups for layer in group.layers]

    @property
    def keys(self) -> set[int]:
        """All layers by identity, and their sections by their keys."""
        return {key for group in self.groups for key in group.keys}


def joined(module: nn.Module, ranks: int, is_wanted: Callable[[Group], bool]) -> Joined | None:
    """Layers in a module, or near in it, that can be split together over so many ranks, by what its forward does.

    Args:
        module: Not split yet.
        ranks: Of the axis.
        is_wanted: Whether layers are to be split that can be.
    """
    if not any(holds_linear(one) for one in (module, *module.children())):
        return None
    flow = follow(module)
    found = [
        group for group in _groups(flow) if _is_of(module, group) and _fits(group, flow, ranks) and is_wanted(group)
    ]
    result = Joined(module, ranks, flow, found)
    return result if result.groups else None


def _named_arguments(module: nn.Module) -> Collection[str]:
    """Names of the arguments of a module's forward, but for those that take what is left."""
    arguments = inspect.signature(module.forward).parameters
    return [name for name, one in arguments.items() if one.kind.name.endswith("KEYWORD") and "VAR" not in one.kind.name]


def _groups(flow: Flow) -> Iterator[Group]:
    """Column layers, and the row layers that take what they give."""
    rest = dict(flow.rows)
    while rest:
        row = rest.pop(next(iter(rest)))
        rows, layers = [row], row.layers
        while more := [key for key, one in rest.items() if one.layers & layers]:
            rows += [rest.pop(key) for key in more]
            layers = _union(one.layers for one in rows)
        columns = tuple(column for key, column in flow.columns.items() if key in layers)
        attentions = tuple(one for one in flow.attentions if one.queries & layers)
        between = [*flow.norms.values(), *flow.dropouts.values()]
        yield Group(columns, tuple(rows), attentions, tuple(one for one, of in between if of & layers))


def _is_of(module: nn.Module, group: Group) -> bool:
    """Whether layers lie in several children of a module: else the child that has them says what becomes of them."""
    own = {id(layer) for layer in group.layers}
    return all(not own <= {id(one) for one in child.modules()} for child in module.children())


def _fits(group: Group, flow: Flow, ranks: int) -> bool:
    """Whether layers can be split together, but for what enters."""
    keys = group.keys
    told = {(id(layer), name) for layer in group.layers for name in _LENGTHS} & {*flow.reads}
    if told:
        return False
    begun = {one.begun for one in (*group.columns, *group.rows)}
    if keys & flow.spoiled or (keys & flow.drawing and len(begun) > 1):
        return False
    if len(group.rows) > len(_by_layers(group)):  # each row gives a sum: a layer before three projections, say
        return False
    if not all(_attends(one, flow, ranks) for one in group.attentions):
        return False
    heads = {_heads(layers, flow) for one in group.attentions for layers in (one.queries, *one.others)}
    if any(layers & keys and lengths & heads for lengths, layers in flow.lengths):  # of each head, perhaps
        return False
    attended = _union(layers for one in group.attentions for layers in (one.queries, *one.others))
    narrow = _union(layers for one in group.attentions for layers in one.others) - _union(
        one.queries for one in group.attentions
    )
    inner = {_inputs(row.linear) for row in group.rows}
    is_even = {column.features for column in group.columns if column.key not in narrow}
    return (
        attended == {column.key for column in group.columns if column.width}
        and all(column.length % column.fold == 0 for column in group.columns)
        and all(_is_whole(columns, flow) for columns in _by_layers(group))
        and is_even == inner
        and len(inner) == 1
        and min(inner) >= ranks
        and all(_says(count, flow) for counts in flow.counts.values() for count in counts if count.layers & keys)
    )


def _by_layers(group: Group) -> list[list[Column]]:
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
    found = {(one.heads, one.features, one.width, one.fold) for one in columns}
    number = {"heads": columns[0].heads, "features": columns[0].features}.get(count.of)  # else it is as it was read
    return len(found) == 1 and (number is None or count.number in (None, number))


def _attends(attention: Attention, flow: Flow, ranks: int) -> bool:
    """Whether heads divide among ranks, and those of keys and values do, or the ranks among them."""
    columns = [[flow.columns[layer] for layer in layers] for layers in (attention.queries, *attention.others)]
    if not all(len({(one.length, one.width) for one in some}) == 1 and some[0].width for some in columns):
        return False
    queries, keys, contents = (_heads(layers, flow) for layers in (attention.queries, *attention.others))
    if keys != contents or queries % ranks or queries % keys:
        return False
    told = id(attention.module), GROUPS
    is_told = GROUPS in vars(attention.module) and len(flow.repeated.get(told, ())) == flow.reads[told]
    is_told = is_told and flow.repeated_otherwise.isdisjoint(attention.others[0] | attention.others[1])
    is_shared = ranks % keys == 0 and is_told and not any(one.is_section for some in columns for one in some)
    return keys % ranks == 0 or is_shared


def _heads(layers: Collection[int], flow: Flow) -> int:
    return next(flow.columns[layer] for layer in layers).heads


def _union(layers: Iterable[frozenset[int]]) -> frozenset[int]:
    return frozenset().union(*layers)


def _inputs(linear: nn.Module) -> int:
    return linear.get_parameter("weight").shape[0 if is_transposed(linear) else 1]
