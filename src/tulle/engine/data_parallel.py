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

import sys
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tulle.comm import lane, probe, traffic, untraced
from tulle.engine.alike import Alike
from tulle.engine.buffers import Buffers
from tulle.engine.ends import NOT_RUNNING, end_with, is_under_way
from tulle.engine.finite import NonFinite
from tulle.engine.foresight import Foresight, is_ids
from tulle.engine.late_updates import LateUpdates
from tulle.engine.ledger import Ledger
from tulle.engine.living import agree_on_living, free_number, is_joined, remember
from tulle.engine.reducer import Reducer
from tulle.engine.slots import Slot
from tulle.engine.split_table import SplitTable
from tulle.engine.split_tables import SplitTables
from tulle.engine.stepped import Stepped
from tulle.engine.syncing import Syncing
from tulle.engine.tables import TableSettings, compact
from tulle.engine.ties import Tie
from tulle.engine.weighing import check_weighed
from tulle.errors import GradientError
from tulle.mesh import Axis
from tulle.parts import hook_arrival, unwrapped
from tulle.tables import TableModule, table_modules, table_of
from tulle.traits import attribute_of

ENGINE = "_tulle_engine"
"""The attribute by which a distributed model, and an optimizer, holds its engine, and each of its trained parameters
knows it."""
_KEPT = "_tulle_engine_kept"
"""The attribute by which a module that has such parameters holds it."""
_running = torch._C._current_graph_task_id
"""The number of the backward that is running; asked at each gradient, so without looking the way to it up."""


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
        self.number = free_number(axis, _alive)
        # A group of its own for every further model: two in one backward interleave as each rank's graph has it.
        self.axis = lane(axis, f"model {self.number}") if self.number else axis
        self.steps = 0
        """Synchronized backward passes so far, and averages of gradients that were set by hand."""
        self.late: LateUpdates | None = None
        """The updates that wait until their parameters are read, if they do."""
        self.stepped: WeakKeyDictionary[Optimizer, Stepped] = WeakKeyDictionary()
        """How this stood when each optimizer stepped last."""
        self._averages = self._last_average = 0
        self._non_finite = NonFinite(self.axis) if check_finite else None
        split = {table.name for table in splits}
        self._slots = {
            name: Slot(name, p) for name, p in model.named_parameters() if p.requires_grad and name not in split
        }
        came, step, network = partial(_split_came, ref(self)), partial(_step, ref(self)), partial(probe, axis)
        self.split_tables = SplitTables(splits, self.axis, came=came, step=step, network=network) if splits else None
        """The run-time of the tables of which each rank has a part."""
        if splits:
            remember(axis)
        self._by_parameter = {id(slot.parameter): slot for slot in self._slots.values()}
        self.syncing = Syncing()
        """Whether gradients travel, not merely add up."""
        self._backward = NOT_RUNNING
        buffers = Buffers(model, self.axis)
        foresights = _watch_lookups(model, self._slots.values()) if axis.size > 1 else {}
        self.reducer = Reducer(self._slots, self.axis, axis, set(tables), settings, bucket_bytes, buffers, foresights)
        """What averages the gradients of replicas."""
        self.alike = Alike(self._slots, self.axis, settings.renormalize)
        """What sees whether replicas are the same still."""
        _alive.add(self)
        self.tie(model, [*(table.parameter for table in splits), *(slot.parameter for slot in self._slots.values())])
        self._watch_gradients(splits)

    def _watch_gradients(self, splits: Sequence[SplitTable]) -> None:
        """Have each gradient seen when it is complete."""
        for table in splits:
            if self.home.size > 1 and table.parameter.requires_grad:  # a softmax over it has gradients of its own
                hook_arrival(table.parameter, partial(_split_arrived, ref(self), table.name))
        for slot in self._slots.values():
            if self.home.size > 1 or self._non_finite is not None:
                hook = partial(_arrived, ref(self), slot.name)
                slot.hook = hook_arrival(slot.parameter, hook).id

    def tie(self, model: nn.Module, parameters: Sequence[Tensor]) -> None:
        """Have parameters know this engine, and the modules that have them hold it."""
        tied, tie = {id(parameter) for parameter in parameters}, Tie(self)
        for parameter in parameters:
            setattr(parameter, ENGINE, tie)
        for module in model.modules():
            if not tied.isdisjoint(map(id, module._parameters.values())):
                module.__dict__[_KEPT] = self

    def synchronize(self) -> None:
        """Send the sums of what has added up within `no_sync`, without a backward. Every rank must call it."""
        for slot in self._slots.values():  # also what came from other stages, of parameters that these hold too
            slot.is_fired |= slot.parameter.grad is not None
        self.reducer.begin_backward()
        traffic.begin(self.steps + 1)
        self.reducer.foresee_all(self.steps + 1)
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
    def backwards(self) -> int:
        """Synchronized backward passes so far."""
        return self.steps - self._averages

    @property
    def now(self) -> Stepped:
        """How many averages there were so far, and how often gradients were written: to be compared later."""
        return Stepped(self.steps, self._averages, self._last_average, self.reducer.writes)

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
    def ledger(self) -> Ledger:
        """What is known of the tables that are replicas, from the first backward on."""
        return self.reducer.ledger

    def schemes(self) -> dict[str, tuple[str, int]]:
        """The scheme or placement in force, and the rows of this rank's last gradient or lookups, by table."""
        return self.ledger.schemes | (self.split_tables.placements() if self.split_tables is not None else {})

    def __reduce_ex__(self, protocol: object) -> tuple[object, ...]:
        """A copied or pickled module carries no engine along."""
        return type(None), ()

    def _arrived(self, slot: Slot) -> None:
        """A gradient is complete."""
        is_there = not slot.has_none()
        slot.is_fired |= is_there
        if self._non_finite is not None:
            self._non_finite.look(slot.name, slot.parameter.grad)
        if not self.syncing:
            compact(slot.parameter)
            return
        if _running() != self._backward:  # as that asks first; but most gradients are not the first of a backward
            self._begin_backward()
        if is_there:  # else as if the parameter had not been used
            self.reducer.arrive(slot)

    def _split_came(self, name: str, gradient: Tensor) -> None:
        """A gradient for rows of a split table is complete."""
        if self._non_finite is not None:
            self._non_finite.look(name, gradient)
        self._begin_backward()

    def _begin_backward(self) -> None:
        """If a gradient is the first of this backward: tell what rows there will be, and have its end waited for."""
        backward = _running()
        if backward == self._backward:
            return
        if self.axis.size > 1:
            _check_followed(is_syncing=bool(self.syncing))
        if self.split_tables is not None and not is_under_way(self._backward):
            self.split_tables.check_ended()
        self._backward = backward
        self.reducer.begin_backward()
        traffic.begin(self.steps + 1)
        end_with(backward, self)
        if self.syncing:
            self.reducer.foresee_all(self.steps + 1)

    def _looked_up(self, parameter: Tensor, module: TableModule, ids: Tensor) -> None:
        """Note a lookup of a gradient that travels by rows, and tell these if it was the last one of a group."""
        slot, foresight = self.slot_of(parameter), self.reducer.foresights.get(id(parameter))
        if slot is None or foresight is None or not (module.sparse or slot.name in self.reducer.dense_tables):
            return
        foresight.note(module, ids)
        if self.syncing.is_on and module.training:
            self.reducer.foresee_looked_up(self.steps + 1)

    def end_backward(self) -> None:
        """All gradients are there: submit what has not been, and wait for everything."""
        self._backward = NOT_RUNNING
        if not self.syncing.end_backward():  # those of replicas add up; of split tables only owners have any
            if self.split_tables is not None:
                self.split_tables.end_backward()
            return
        self.steps += 1
        traffic.ended = self.steps
        if self.late is not None:  # where gradients of split tables were all that came
            self.late.make_replicas_true()
        if self.axis.size > 1:
            if self.split_tables is not None:
                self.split_tables.check_alike()
            self.reducer.submit_all(self.steps, is_late=self.late is not None)
            if self.split_tables is not None:
                self.split_tables.end_backward()
            self.reducer.finish(self.steps, self.late)
            self.alike.check(self.steps, is_late=self.late is not None)
            check_weighed(self.home, self.axis, self.steps)
        if self._non_finite is not None:  # after the sums, so that the next backward finds nothing under way
            self._non_finite.raise_if_any(self.steps)


_alive: WeakSet[DataParallel] = WeakSet()


def living_engines() -> list[DataParallel]:
    """Those of all models whose ranks are joined, in the order that all ranks have."""
    return sorted((one for one in _alive if is_joined(one.home)), key=lambda one: one.number)


def living_split_tables() -> list[SplitTables]:
    """The run-times of all models with split tables that all ranks have, in that order. Every rank must call it."""
    agreed = agree_on_living(lambda home: [one.number for one in _with_split_tables() if one.home.group is home])
    everywhere = [one for one in _with_split_tables() if one.number in agreed.get(one.home.group, {one.number})]
    return [one.split_tables for one in everywhere if one.split_tables is not None]


def _with_split_tables() -> list[DataParallel]:
    return [one for one in living_engines() if one.split_tables is not None]


def engine_of(owner: nn.Module | Tensor) -> DataParallel | None:
    """The engine that keeps a model, or one parameter, in step, or None."""
    found: DataParallel | Tie[DataParallel] | None = attribute_of(owner, ENGINE)
    return found() if isinstance(found, Tie) else found


def engines_of(parameters: Iterable[Tensor]) -> set[DataParallel]:
    """The engines that keep some parameters in step."""
    ties: set[Tie[DataParallel] | None] = {getattr(parameter, ENGINE, None) for parameter in parameters}
    return {engine for tie in ties if tie is not None and (engine := tie()) is not None}


def is_cut_off(parameter: Tensor) -> bool:
    """Whether a parameter was kept in step with those of other ranks, and is not any more, as its model is gone."""
    found: Tie[DataParallel] | None = getattr(parameter, ENGINE, None)
    return found is not None and found.is_cut


def _watch_lookups(model: nn.Module, slots: Iterable[Slot]) -> dict[int, Foresight]:
    """Have the lookups in trained tables noted, by the identity of their parameter."""
    trained = {id(slot.parameter) for slot in slots}
    foresights: dict[int, Foresight] = {}
    for _, module, table in table_modules(model):
        if id(table) in trained:
            foresights.setdefault(id(table), Foresight())
            module.register_forward_pre_hook(_looked_up, with_kwargs=True)
    return foresights


# A function of the module, not a bound method: a model that is copied takes its hooks along, but not its engine.
def _looked_up(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
    assert isinstance(module, TableModule), "only tables are watched"
    table = None if torch.compiler.is_compiling() else table_of(module)
    engine = None if table is None else engine_of(table)
    ids = arguments[0] if arguments else keywords.get("input")
    if table is not None and engine is not None and torch.is_grad_enabled() and is_ids(ids):
        engine._looked_up(table, module, unwrapped(ids))


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


# Hooks of a backward that may lie within a function that is compiled: the compiler traces what these call.
@untraced
def _arrived(engine: ref[DataParallel], name: str, parameter: Tensor) -> None:
    alive = engine()
    if alive is not None:
        alive._arrived(alive._slots[name])


def _split_came(engine: ref[DataParallel], name: str, gradient: Tensor) -> None:
    alive = engine()
    if alive is not None:
        alive._split_came(name, gradient)


def _step(engine: ref[DataParallel]) -> int:
    """The number of the step that is under way in forward."""
    alive = engine()
    return traffic.step if alive is None else alive.steps + 1


@untraced
def _split_arrived(engine: ref[DataParallel], name: str, parameter: Tensor) -> None:
    alive = engine()
    if alive is not None and parameter.grad is not None:
        alive._split_came(name, parameter.grad)


def _check_followed(*, is_syncing: bool) -> None:
    """Raise of a backward whose end is not told, or whose gradients are to have gradients, which the means have not."""
    compiled: Any = sys.modules.get("torch._dynamo.compiled_autograd")
    if torch.compiler.is_compiling() or (compiled is not None and compiled.in_compiled_autograd_region):
        raise GradientError(
            "a backward was to be compiled as a whole (torch._dynamo.config.compiled_autograd), which does not tell "
            "when it ends, so that gradients would stay those of one rank: leave that out, and compile the model alone"
        )
    if is_syncing and torch.is_grad_enabled():
        raise GradientError(
            "gradients were asked for with create_graph=True, but the means over the ranks have no graph: leave it "
            "out, and take torch.autograd.grad(loss, parameters, create_graph=True) for a penalty of gradients"
        )
