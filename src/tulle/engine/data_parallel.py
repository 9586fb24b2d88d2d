"""`DataParallel`: keeps the replicas of one model in step along one axis, overlapped with backward.

    backward            g5   g4   g3   g2   g1   table
    dense buckets            [g5 g4]->  [g3 g2]->  [g1]->
    tables              numbers of the rows that were looked up ->    values ->
    end of backward                                             wait for all: the gradients are the means

Hooks on the parameters see each gradient when it is complete, so the model can be called in any way: through its
submodules, several times, under checkpointing. All collectives are submitted in one order, which rank 0's first
backward fixed: that in which its gradients came. A bucket whose gradients are there waits for those before it. Where
updates wait until parameters are read (`tulle.engine.late_updates`), so does what is left of the end of backward.

Source: Li et al., *PyTorch Distributed: Experiences on Accelerating Data Parallel Training* (VLDB'20).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from tulle.comm import gather_values, lane, probe, traffic
from tulle.cost import Cost, Network
from tulle.engine.buckets import FIRST_BUCKET_BYTES, Bucket, Slot, Traveller, lay_out
from tulle.engine.buffers import Buffers
from tulle.engine.ends import NOT_RUNNING, end_with
from tulle.engine.finite import NonFinite
from tulle.engine.foresight import Foresight, is_ids
from tulle.engine.groups import TableGroup
from tulle.engine.late_updates import LateUpdates
from tulle.engine.split_table import SplitTable
from tulle.engine.split_tables import SplitTables
from tulle.engine.tables import Observation, TableSettings, TableSync, comes_by_rows, compact
from tulle.engine.ties import Tie
from tulle.engine.turns import Turns, best_piece_bytes
from tulle.mesh import Axis
from tulle.sync import Choice
from tulle.tables import TableModule, table_modules, table_of
from tulle.traits import attribute_of

GROUPED_BYTES = FIRST_BUCKET_BYTES
"""Tables travel apart if dense gradients of at least so many bytes come between theirs."""
_REORDERED_AFTER = 4
"""Backwards after which the order of these pieces is fixed; the first ones are slow."""
ENGINE = "_tulle_engine"
"""The attribute by which a distributed model, and an optimizer, holds its engine, and each of its trained parameters
knows it."""
_KEPT = "_tulle_engine_kept"
"""The attribute by which a module that has such parameters holds it."""


@dataclass(frozen=True, slots=True)
class Stepped:
    """How an engine stood when an optimizer stepped.

    Args:
        steps: Its synchronized backward passes, and averages of gradients that were set by hand.
        averages: These.
        last_average: After how many steps the last of these was.
        writes: How often something was written to gradients that it gave.
    """

    steps: int = 0
    averages: int = 0
    last_average: int = 0
    writes: int = 0

    @property
    def backwards(self) -> int:
        """Its synchronized backward passes alone."""
        return self.steps - self.averages

    @property
    def is_by_hand(self) -> bool:
        """Whether the last gradients were set by hand, or none have come yet."""
        return self.last_average == self.steps


class DataParallel:
    """The run-time of one distributed model; `tulle.distribute` makes it.

    Args:
        model: Whose trained parameters are replicas.
        axis: Whose ranks hold them.
        tables: Names of the parameters that get sparse gradients. Others that turn out to do so join them.
        settings: How the tables are kept in step.
        splits: Tables of which each rank has a part.
        bucket_bytes: Size of a bucket of dense gradients.
        check_finite: Whether to look for NaN and infinity in this rank's gradients before they are mixed.
    """

    def __init__(
        self,
        model: nn.Module,
        axis: Axis,
        *,
        tables: Sequence[str],
        settings: TableSettings,
        splits: Sequence[SplitTable] = (),
        bucket_bytes: int,
        check_finite: bool,
    ) -> None:
        self.model = model
        self.home = axis
        self.number = _free_number(axis)
        # A group of its own for every further model: two in one backward interleave as each rank's graph has it.
        self.axis = lane(axis, f"model {self.number}") if self.number else axis
        self.steps = 0
        """Synchronized backward passes so far, and averages of gradients that were set by hand."""
        self.table_sync: TableSync | None = None
        """The run-time of the tables, from the first backward on."""
        self.late: LateUpdates | None = None
        """The updates that wait until their parameters are read, if they do."""
        self.stepped: WeakKeyDictionary[Optimizer, Stepped] = WeakKeyDictionary()
        """How this stood when each optimizer stepped last."""
        self._averages = self._last_average = 0
        self._settings = settings
        self._bucket_bytes = bucket_bytes
        self._non_finite = NonFinite(self.axis) if check_finite else None
        split = {table.name for table in splits}
        self._slots = {
            name: Slot(name, p) for name, p in model.named_parameters() if p.requires_grad and name not in split
        }
        came, network = partial(_split_came, ref(self)), partial(probe, axis)
        self.split_tables = SplitTables(splits, self.axis, came=came, network=network) if splits else None
        """The run-time of the tables of which each rank has a part."""
        self._by_parameter = {id(slot.parameter): slot for slot in self._slots.values()}
        self._tables = set(tables)
        self._is_syncing = True
        self._backward = NOT_RUNNING
        self._first_order: list[str] = []
        self._items: list[Traveller] = []
        self._places: dict[str, tuple[Traveller, int]] = {}
        self._turns = Turns()
        self._buffers = Buffers(model, self.axis)
        self._groups: list[TableGroup] = []
        self._foresights = self._watch(model) if axis.size > 1 else {}
        _alive.add(self)
        self.tie(model, [*(table.parameter for table in splits), *(slot.parameter for slot in self._slots.values())])
        for table in splits:
            if axis.size > 1 and table.parameter.requires_grad:  # a softmax over it has gradients of its own
                table.parameter.register_post_accumulate_grad_hook(partial(_split_arrived, ref(self), table.name))
        for slot in self._slots.values():
            if axis.size > 1 or check_finite:
                hook = partial(_arrived, ref(self), slot.name)
                slot.hook = slot.parameter.register_post_accumulate_grad_hook(hook).id

    def tie(self, model: nn.Module, parameters: Sequence[Tensor]) -> None:
        """Have parameters know this engine, and the modules that have them hold it."""
        tied = {id(parameter) for parameter in parameters}
        for parameter in parameters:
            setattr(parameter, ENGINE, Tie(self))
        for module in model.modules():
            if not tied.isdisjoint(map(id, module._parameters.values())):
                module.__dict__[_KEPT] = self

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let gradients add up on each rank within this context; the first backward after it sends the sums."""
        before, self._is_syncing = self._is_syncing, False
        try:
            yield
        finally:
            self._is_syncing = before

    @property
    def is_syncing(self) -> bool:
        """Whether gradients travel, not merely add up."""
        return self._is_syncing

    def synchronize(self) -> None:
        """Send the sums of what has added up within `no_sync`, without a backward. Every rank must call it."""
        for slot in self._slots.values():  # also what came from other stages, of parameters that these hold too
            slot.is_fired |= slot.parameter.grad is not None
        self._turns.begin()
        traffic.step = self.steps + 1
        for group in self._groups:
            self._foresee(group)
        self.end_backward()

    def average(self, slots: Sequence[Slot]) -> None:
        """Average all gradients, some of which were set by hand. Every rank must call it.

        Args:
            slots: Of these.
        """
        if self._non_finite is not None:
            for slot in slots:
                self._non_finite.look(slot.name, slot.parameter.grad)
        self._averages += 1
        self.synchronize()
        self._last_average = self.steps

    def slot_of(self, parameter: Tensor) -> Slot | None:
        """The slot of a replica, or None."""
        return self._by_parameter.get(id(parameter))

    @property
    def now(self) -> Stepped:
        """How this stands."""
        return Stepped(self.steps, self._averages, self._last_average, sum(item.writes for item in self._items))

    def update_late(self) -> LateUpdates:
        """Let updates wait until somebody reads what they write; attach the optimizers. Every rank must call it."""
        self.late = LateUpdates()
        for slot in self._slots.values():
            slot.parameter.register_hook(partial(_gradient_comes, ref(self.late)))
        if self.split_tables is not None:
            self.split_tables.update_late(self.late)
            for table in self.split_tables.tables.values():
                if table.parameter.requires_grad:
                    table.parameter.register_hook(partial(_part_gradient_comes, ref(self.late)))
        return self.late

    @property
    def network(self) -> Network | None:
        """The network by which schemes were chosen, None before the first backward or without tables."""
        return self.table_sync.network if self.table_sync else None

    def choices(self) -> dict[str, Choice]:
        """The choice in force for each table that was not given a scheme, from the first backward on."""
        return self.table_sync.choices if self.table_sync else {}

    def measured(self) -> dict[str, Cost]:
        """What each table's exchange was seen to take."""
        return self.table_sync.measured if self.table_sync else {}

    def take_observations(self) -> list[Observation]:
        """What was measured of the tables' gradients since the last call."""
        return self.table_sync.take_observations() if self.table_sync else []

    def schemes(self) -> dict[str, tuple[str, int]]:
        """The scheme or placement in force, and the rows of this rank's last gradient or lookups, by table."""
        sync, split = self.table_sync, self.split_tables
        found = (
            {slot.name: (sync.scheme(slot.name), sync.rows.get(slot.name, 0)) for slot in sync.slots} if sync else {}
        )
        return found | (split.placements() if split else {})

    def __reduce_ex__(self, protocol: object) -> tuple[object, ...]:
        """A copied or pickled module carries no engine along."""
        return type(None), ()

    def _arrived(self, slot: Slot) -> None:
        """A gradient is complete."""
        slot.is_fired = True
        if self._non_finite is not None:
            self._non_finite.look(slot.name, slot.parameter.grad)
        if not self._is_syncing:
            compact(slot.parameter)
            return
        if self._begin_backward():
            for group in self._groups:
                self._foresee(group)
        if not self._items:
            if self.axis.size > 1:
                self._first_order.append(slot.name)
        elif not slot.lets_others_first():  # else it goes at the end, as these have left it
            item, position = self._places[slot.name]
            item.arrive(position)
            self._turns.arrived(item)

    def _split_came(self, name: str, gradient: Tensor) -> None:
        """A gradient for rows of a split table is complete."""
        if self._non_finite is not None:
            self._non_finite.look(name, gradient)
        self._begin_backward()

    def _begin_backward(self) -> bool:
        """Whether a gradient is the first of this backward, whose end is then waited for."""
        backward = torch._C._current_graph_task_id()
        if backward == self._backward:
            return False
        self._backward = backward
        self._turns.begin()
        traffic.step = self.steps + 1
        end_with(backward, self)
        return True

    def _looked_up(self, parameter: Tensor, module: TableModule, ids: Tensor) -> None:
        """Note a lookup, and tell the other ranks its rows if it was the last one of a group.

        All ranks tell the groups in one order, each once a step. What another forward, without a backward, makes one
        of them tell is found to be wrong when the gradients come.
        """
        self._foresights[id(parameter)].note(module, ids)
        for group in self._groups if self._is_syncing and module.training else ():
            if not group.is_foreseen:
                if not group.is_looked_up:
                    return
                self._foresee(group)

    def _foresee(self, group: TableGroup) -> None:
        assert self.table_sync is not None, "groups have what their tables share"
        self.table_sync.begin_step(self.steps + 1)
        group.foresee()

    def end_backward(self) -> None:
        """All gradients are there: submit what has not been, and wait for everything."""
        self._backward = NOT_RUNNING
        if not self._is_syncing:  # gradients of replicas add up; those of split tables have no other place than owners
            if self.split_tables is not None:
                self.split_tables.end_backward()
            return
        self.steps += 1
        if self.late is not None:  # where gradients of split tables were all that came
            self.late.make_replicas_true()
        if self.axis.size > 1:
            if not self._items:
                self._fix_order()
            self._turns.end()
            if self.split_tables is not None:
                self.split_tables.end_backward()
            # Tables first: what a bucket waits for is then there.
            in_turn = sorted(self._items, key=lambda item: not isinstance(item, TableGroup))
            for item in in_turn if self.late is None else self._postponed(in_turn, self.late):
                item.finish()
            for foresight in self._foresights.values():  # also of a table that turned out to get dense gradients
                foresight.forget()
        if self._non_finite is not None:  # after the sums, so that the next backward finds nothing under way
            self._non_finite.raise_if_any(self.steps)

    def _postponed(self, items: Sequence[Traveller], late: LateUpdates) -> list[Traveller]:
        """Have buckets waited for when their gradients or parameters are read; give what must be waited for now."""
        if self.steps == _REORDERED_AFTER:
            self._turns.reorder(late.read, self.axis, probe(self.home))
        late.begin()
        now: list[Traveller] = []
        for item in items:
            if isinstance(item, Bucket) and late.takes(item):
                late.postpone(item)
            else:
                now.append(item)
        return now

    def _fix_order(self) -> None:
        """After the first backward: find the tables, and lay out buckets in the order of rank 0's gradients."""
        gradients = {name: slot.parameter.grad for name, slot in self._slots.items()}
        kinds = {name: comes_by_rows(gradient) for name, gradient in gradients.items() if gradient is not None}
        heard = gather_values((self._first_order, kinds), self.axis, label="the order of gradients")
        found = {kind for _, by_rows in heard for kind in by_rows.items()}
        self._tables |= {name for name, by_rows in found if by_rows}
        # Tied to an output layer, say: a sparse and a dense gradient add up to a dense one, here or elsewhere.
        self._tables -= {name for name, by_rows in found if not by_rows}
        order = list(dict.fromkeys([*heard[0][0], *reversed(self._slots)]))
        place = {name: number for number, name in enumerate(order)}
        dense = [self._slots[name] for name in order if name not in self._tables]
        self._items = [*(self._buckets(dense) if self.late is None else self._late_buckets(dense))]
        if self._tables:
            self.table_sync, self._groups = self._sync_tables(order)
        for group in self._groups:
            last_table = max(place[slot.name] for slot in group.slots)
            turn = sum(all(place[slot.name] < last_table for slot in item.slots) for item in self._items)
            self._items.insert(turn, group)
        self._places = {slot.name: (item, position) for item in self._items for position, slot in enumerate(item.slots)}
        self._turns = Turns(self._items)

    def _buckets(self, slots: Sequence[Slot]) -> list[Bucket]:
        """Buckets of which the last carries the marks of the buffers."""
        laid_out = list(lay_out(slots, self._bucket_bytes)) or ([[]] if len(self._buffers) else [])
        buckets = [Bucket(slots, self.axis) for slots in laid_out[:-1]]
        buckets += [Bucket(slots, self.axis, self._buffers if len(self._buffers) else None) for slots in laid_out[-1:]]
        return buckets

    def _late_buckets(self, slots: Sequence[Slot]) -> list[Bucket]:
        """Small buckets, which are waited for one by one, on a lane of their own, where nobody waits behind them."""
        network = probe(self.home)  # while nothing else is under way
        own = lane(self.axis, "late updates")
        piece_bytes = min(self._bucket_bytes, best_piece_bytes(network, self.axis.size))
        marks = [Bucket([], self.axis, self._buffers)] if len(self._buffers) else []
        return [Bucket(part, own, piece_bytes=piece_bytes) for part in lay_out(slots, piece_bytes)] + marks

    def _sync_tables(self, order: Sequence[str]) -> tuple[TableSync, list[TableGroup]]:
        slots = [self._slots[name] for name in order if name in self._tables]
        sync = TableSync(slots, self.axis, probe(self.home), self._settings)
        sync.begin_step(self.steps)
        groups: list[list[Slot]] = []
        dense_bytes = GROUPED_BYTES
        for name in order:
            slot = self._slots[name]
            if name not in self._tables:
                dense_bytes += slot.parameter.nbytes
                continue
            if dense_bytes >= GROUPED_BYTES:
                groups.append([])
            groups[-1].append(slot)
            dense_bytes = 0
        return sync, [TableGroup(group, sync, self._foresights) for group in groups]

    def _watch(self, model: nn.Module) -> dict[int, Foresight]:
        """Have the lookups in tables noted, by the identity of their parameter."""
        trained = {id(slot.parameter) for slot in self._slots.values()}
        foresights: dict[int, Foresight] = {}
        for _, module, table in table_modules(model):
            if id(table) in trained:
                foresights.setdefault(id(table), Foresight())
                module.register_forward_pre_hook(_looked_up, with_kwargs=True)
        return foresights


_alive: WeakSet[DataParallel] = WeakSet()


def living_engines() -> list[DataParallel]:
    """Those of all models whose ranks are joined, in the order that all ranks have."""
    return sorted((one for one in _alive if _is_joined(one.home)), key=lambda one: one.number)


def living_split_tables() -> list[SplitTables]:
    """The run-times of all models with split tables, in that order."""
    return [one.split_tables for one in living_engines() if one.split_tables is not None]


def _is_joined(axis: Axis) -> bool:
    """Whether its process group is there: something may hold a model longer than that, a compiler's cache say."""
    try:
        return axis.size == 1 or bool(dist.get_backend(axis.group))
    except ValueError:
        return False


def engine_of(owner: nn.Module | Tensor) -> DataParallel | None:
    """The engine that keeps a model, or one parameter, in step, or None."""
    found: DataParallel | Tie[DataParallel] | None = attribute_of(owner, ENGINE)
    return found() if isinstance(found, Tie) else found


def is_cut_off(parameter: Tensor) -> bool:
    """Whether a parameter was kept in step with those of other ranks, and is not any more, as its model is gone."""
    found: Tie[DataParallel] | None = getattr(parameter, ENGINE, None)
    return found is not None and found.is_cut


# A function of the module, not a bound method: a model that is copied takes its hooks along, but not its engine.
def _looked_up(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
    assert isinstance(module, TableModule), "only tables are watched"
    table = None if torch.compiler.is_compiling() else table_of(module)
    engine = None if table is None else engine_of(table)
    ids = arguments[0] if arguments else keywords.get("input")
    if table is not None and engine is not None and module.sparse and torch.is_grad_enabled() and is_ids(ids):
        engine._looked_up(table, module, ids)


def _gradient_comes(late: ref[LateUpdates], gradient: Tensor) -> None:
    """Before the first gradient is added to what is there: what waits of replicas is done."""
    alive = late()
    if alive is not None:
        alive.make_replicas_true()


def _part_gradient_comes(late: ref[LateUpdates], gradient: Tensor | None) -> None:
    """The same of a split table that has gradients past its lookups."""
    alive = late()
    if alive is not None and gradient is not None:
        alive.make_all_true()


def _arrived(engine: ref[DataParallel], name: str, parameter: Tensor) -> None:
    alive = engine()
    if alive is not None:
        alive._arrived(alive._slots[name])


def _split_came(engine: ref[DataParallel], name: str, gradient: Tensor) -> None:
    alive = engine()
    if alive is not None:
        alive._split_came(name, gradient)


def _split_arrived(engine: ref[DataParallel], name: str, parameter: Tensor) -> None:
    alive = engine()
    if alive is not None and parameter.grad is not None:
        alive._split_came(name, parameter.grad)


def _free_number(axis: Axis) -> int:
    """The smallest number that no living engine has on any rank. Every rank of the axis must call it."""
    mine = {engine.number for engine in _alive if engine.home.group is axis.group}
    taken = set().union(*gather_values(mine, axis, label="the model's number"))
    return next(number for number in count() if number not in taken)
