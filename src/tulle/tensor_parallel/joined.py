"""Layers of classes that nobody knows, which are split together where the code around them shows that they can be.

    up, activation, down                     column, row: one sum of activations each way
    queries, keys, values, attend, output    column, row, by heads

Each for itself, such layers would each gather what they give; together nothing travels between them. Source: Shoeybi
et al., *Megatron-LM* (2019), section 3; what a module computes is known by `forward.follow`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from tulle.tensor_parallel.dataflow.flow import Flow
from tulle.tensor_parallel.dataflow.folds import Refolded
from tulle.tensor_parallel.dataflow.forward import follow, holds_linear
from tulle.tensor_parallel.dataflow.notes import Argument, Attention, Column, Site
from tulle.tensor_parallel.dataflow.products import GROUPS
from tulle.tensor_parallel.dataflow.rewriting import AsWhole, Counted, Rewriting
from tulle.tensor_parallel.dropout import draw_apart
from tulle.tensor_parallel.groups import Group, by_layers, fits, groups, heads_of, is_of, union
from tulle.tensor_parallel.linear import inputs_of
from tulle.tensor_parallel.norms import split_norm
from tulle.tensor_parallel.placement import length_on
from tulle.tensor_parallel.region import Entering, Gathered, Kept, OfHeads, Region, enter_within
from tulle.tensor_parallel.splitter import Splitter
from tulle.tensor_parallel.told import OfThree, Told, Watch, tell_within


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
        self._rewrite(to, name_of)
        for key, frame in self.flow.frames.items():
            region = to.within(name_of(frame)).region
            names = [name for name in _named_arguments(frame) if self._is_entered((key, name))]  # alike on all ranks
            regions = {name: self._region((key, name), region) for name in names}
            if regions:
                enter_within(frame, regions)
        owners = self.flow.owners | {id(one): one for one in self.module.modules()}
        told = tuple(self._told())
        for group in self.groups:
            self._split(group, to, name_of)
            for columns in by_layers(group):
                linear = columns[0].linear
                if self.flow.of_three & {id(linear), *(one.key for one in columns)}:
                    linear.register_forward_hook(OfThree(name_of(linear)))
        self._give_out(to, name_of)
        if told:
            tell_within(self.module, told)
        decided = tuple((owners[key], name, value) for (key, name), value in self.flow.decided.items() if key in owners)
        if decided:
            self.module.register_forward_pre_hook(Watch(name_of(self.module), decided))

    def _give_out(self, to: Splitter, name_of: Callable[[nn.Module], str]) -> None:
        """Have what is attended to be that of all heads where a program may see it."""
        keys = self.keys
        for place, weights in self.flow.given_out.items():
            if weights.layers & keys:
                whole = Gathered(to.within(name_of(self.module)).region, place, weights.dim)
                self.module.register_forward_hook(whole)
        for (owner, name), weights in self.flow.kept.items():
            if weights.layers & keys:
                frame = self.flow.frames[owner]
                frame.register_forward_hook(Kept(to.within(name_of(frame)).region, name, weights.dim))

    def _told(self) -> Iterator[Told]:
        """What attributes are to say within forward, of one rank's."""
        for attention in (one for group in self.groups for one in group.attentions):
            if self._shared(attention):
                yield attention.module, GROUPS, heads_of(attention.queries, self.flow) // self.ranks

    def _rewritings(self, keys: set[int]) -> Iterator[tuple[nn.Module, Rewriting, list[Site]]]:
        """Modules whose code says how much there is of some layers' work, and where."""
        said = [site for site, counts in self.flow.counts.items() if any(one.layers & keys for one in counts)]
        for key in dict.fromkeys(site.at.owner for site in said):
            module = self.flow.frames[key]
            sites = [site for site in said if site.at.owner == key]
            yield module, Rewriting(module, sites, self.flow.reached), sites

    def _own(self, site: Site, rank: int) -> dict[int, set[int]]:
        """What numbers that are said in a place become on a rank."""
        shared = union(self._shared(one) for group in self.groups for one in group.attentions)
        found: dict[int, set[int]] = {}
        for count in self.flow.counts[site]:
            column = self.flow.columns[next(iter(count.layers))]
            whole, own = column.features, self._features(column, shared, rank)
            if count.is_of_what_runs:  # of queries, where they meet fewer keys that are repeated
                column = max((self.flow.columns[layer] for layer in count.layers), key=lambda one: one.heads)
            if count.of in ("heads", "fold", "enter") or (count.of == "shape" and column.width):
                whole, own = column.heads, 1 if count.layers <= shared else column.heads // self.ranks
            elif count.of == "width":  # of all that is fused in a head, if that is how it is seen first
                whole = own = count.number or 0
            elif count.of == "end":
                whole = count.number or 0
                others = (one for one in self.flow.columns.values() if one.linear is column.linear and one.is_section)
                own = sum(self._features(one, shared, rank) for one in others if one.start + one.length <= whole)
            found.setdefault(-1 if count.is_rest else whole, set()).add(own)
        return found

    def _features(self, column: Column, shared: Collection[int], rank: int) -> int:
        """How many features a rank has of each that is fused in a layer, or in a section."""
        if not column.width:
            return length_on(rank, column.features, self.ranks)
        return column.head_width * (1 if column.key in shared else column.heads // self.ranks)

    def _rewrite(self, to: Splitter, name_of: Callable[[nn.Module], str]) -> None:
        """Have the code say a rank's numbers."""
        for module, rewriting, sites in self._rewritings(self.keys):
            rewriting.apply([self._counted(site, to.region, name_of(module)) for site in sites])

    def _counted(self, site: Site, region: Region, label: str) -> Callable[[Any], Any]:
        """What the code says there on this rank."""
        rank = region.axis.rank
        numbers = tuple((whole, min(of)) for whole, of in self._own(site, rank).items())
        count = next(iter(self.flow.counts[site]))
        if count.of == "enter":
            return Entering(OfHeads(region.axis, label, heads=numbers[0][0], dim=count.place or 0))
        if count.of == "fold":
            return Refolded(label, count.dims[0], count.dims[1], *numbers[0])
        if count.place is not None:
            return AsWhole(count.place, *numbers[0])
        return Counted(label, numbers, site.place)

    def _split(self, group: Group, to: Splitter, name_of: Callable[[nn.Module], str]) -> None:
        inner = inputs_of(group.rows[0].linear)
        shared = [self._shared(one) for one in group.attentions]
        for attention, layers in zip(group.attentions, shared, strict=True):
            self._split_shared(attention, layers, to, name_of)
        for columns in by_layers(group):
            if columns[0].key not in union(shared):
                self._split_columns(columns, to.within(name_of(columns[0].linear)))
        for row in group.rows:
            to.within(name_of(row.linear)).row(row.linear)
        self._split_between(group, inner, to, name_of)
        if group.keys & self.flow.drawing:
            columns, rows = [one[0].linear for one in by_layers(group)], [one.linear for one in group.rows]
            draw_apart(self.module, columns, rows, to.within(name_of(columns[0])).region, is_always=True)

    def _split_between(self, group: Group, inner: int, to: Splitter, name_of: Callable[[nn.Module], str]) -> None:
        """Have norms and dropout see parts."""
        for norm, layers in self.flow.norms.values():
            if layers & group.keys:
                to.within(name_of(norm)).summed(norm)
        for norm, layers in self.flow.wide_norms.values():
            if layers & group.keys:
                split_norm(norm, self.flow.columns[min(layers)].features, to.within(name_of(norm)))
        for dropout, layers in self.flow.dropouts.values():
            if layers & group.keys:
                to.within(name_of(dropout)).hidden_dropout(dropout, inner)

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
        queries, pairs = (heads_of(layers, self.flow) for layers in (attention.queries, attention.others[0]))
        first = to.shared_head(queries, pairs)
        for column in (self.flow.columns[layer] for layer in shared):
            width = column.width or 0
            to.within(name_of(column.linear)).shared_rows(column.linear, slice(first * width, (first + 1) * width))

    def _shared(self, attention: Attention) -> frozenset[int]:
        """Layers of keys and values that stay whole on every rank."""
        layers = attention.others[0] | attention.others[1]
        return layers if heads_of(attention.others[0], self.flow) % self.ranks else frozenset()

    def _region(self, argument: Argument, region: Region) -> Region:
        counts = {
            heads_of(one.queries, self.flow)
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
        shared = union(map(self._shared, group.attentions))
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
            and all(self._is_one(site) for site in sites)
            for _, rewriting, sites in self._rewritings(keys)
        )

    def _is_one(self, site: Site) -> bool:
        """Whether a place in the code has but one meaning, if it is no number."""
        found = {(count.of, count.dims, count.place) for count in self.flow.counts[site]}
        is_number = not any(count.is_of_what_runs for count in self.flow.counts[site])
        return is_number or (len(found) == 1 and len(self._own(site, 0)) == 1)

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
    found = [group for group in groups(flow) if is_of(module, group) and fits(group, flow, ranks) and is_wanted(group)]
    result = Joined(module, ranks, flow, found)
    return result if result.groups else None


def _named_arguments(module: nn.Module) -> Collection[str]:
    """Names of the arguments of a module's forward, but for those that take what is left."""
    arguments = inspect.signature(module.forward).parameters
    return [name for name, one in arguments.items() if one.kind.name.endswith("KEYWORD") and "VAR" not in one.kind.name]
