"""`DataParallel`: keeps the replicas of one model in step along one axis, overlapped with backward.

    backward            g5   g4   g3   g2   g1   table
    dense buckets            [g5 g4]->  [g3 g2]->  [g1]->
    tables                                        announce -> sum ->
    end of backward                                             wait for all: the gradients are the means

Hooks on the parameters see each gradient when it is complete, so the model can be called in any way: through its
submodules, several times, under checkpointing. All collectives are submitted in one order, which rank 0's first
backward fixed: that in which its gradients came. A bucket whose gradients are there waits for those before it.

Source: Li et al., *PyTorch Distributed: Experiences on Accelerating Data Parallel Training* (VLDB'20).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from weakref import WeakSet, ref

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from tulle.comm import gather_values, lane, probe, traffic
from tulle.cost import Network
from tulle.engine.buckets import Bucket, Slot, Traveller, lay_out
from tulle.engine.buffers import Buffers
from tulle.engine.finite import NonFinite
from tulle.engine.tables import TableSync, compact
from tulle.errors import ModelError
from tulle.mesh import Axis
from tulle.sync import Choice

_NOT_RUNNING = -1
ENGINE = "_tulle_engine"
"""The attribute by which a distributed model, and each of its trained parameters, holds its engine."""


class DataParallel:
    """The run-time of one distributed model; `tulle.distribute` makes it.

    Args:
        model: Whose trained parameters are replicas.
        axis: Whose ranks hold them.
        tables: Names of the parameters that get sparse gradients. Others that turn out to do so join them.
        schemes: A scheme's name by table; `"auto"`, or absent, means chosen by measured rows.
        renormalize: By table, what an embedding with `max_norm` does to the rows that any rank looked up.
        bucket_bytes: Size of a bucket of dense gradients.
        check_finite: Whether to look for NaN and infinity in this rank's gradients before they are mixed.
    """

    def __init__(
        self,
        model: nn.Module,
        axis: Axis,
        *,
        tables: Sequence[str],
        schemes: Mapping[str, str],
        renormalize: Mapping[str, Callable[[Tensor], None]],
        bucket_bytes: int,
        check_finite: bool,
    ) -> None:
        self.home = axis
        self.number = _free_number(axis)
        # A group of its own for every further model: two in one backward interleave as each rank's graph has it.
        self.axis = lane(axis, f"model {self.number}") if self.number else axis
        self.steps = 0
        """Synchronized backward passes so far."""
        self.table_sync: TableSync | None = None
        """The run-time of the tables, from the first backward on."""
        self._schemes = schemes
        self._renormalize = renormalize
        self._bucket_bytes = bucket_bytes
        self._non_finite = NonFinite(self.axis) if check_finite else None
        self._slots = {name: Slot(name, p) for name, p in model.named_parameters() if p.requires_grad}
        self._tables = set(tables)
        self._is_syncing = True
        self._backward = _NOT_RUNNING
        self._first_order: list[str] = []
        self._items: list[Traveller] = []
        self._places: dict[str, tuple[Traveller, int]] = {}
        self._submitted = 0
        self._buffers = Buffers(model, self.axis)
        _alive.add(self)
        for slot in self._slots.values():
            # By the attribute the parameter holds the engine, where the garbage collector sees it; its hook does not.
            setattr(slot.parameter, ENGINE, self)
            if axis.size > 1 or check_finite:
                slot.parameter.register_post_accumulate_grad_hook(partial(_arrived, ref(self), slot.name))

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let gradients add up on each rank within this context; the first backward after it sends the sums."""
        before, self._is_syncing = self._is_syncing, False
        try:
            yield
        finally:
            self._is_syncing = before

    @property
    def network(self) -> Network | None:
        """The network by which schemes were chosen, None before the first backward or without tables."""
        return self.table_sync.network if self.table_sync else None

    def choices(self) -> dict[str, Choice]:
        """The choice in force for each table that was not given a scheme, from the first backward on."""
        return self.table_sync.choices if self.table_sync else {}

    def schemes(self) -> dict[str, tuple[str, int]]:
        """The scheme in force, and the rows of this rank's last gradient, by table."""
        sync = self.table_sync
        return {slot.name: (sync.scheme(slot.name), sync.rows.get(slot.name, 0)) for slot in sync.slots} if sync else {}

    def check_covered(self, parameters: Iterable[Tensor]) -> None:
        """Raise if a parameter has a gradient that no engine keeps in step: it was added or unfrozen later.

        Raises:
            ModelError: Naming its shape and the mend.
        """
        for parameter in parameters:
            if parameter.grad is not None and engine_of(parameter) is None:
                raise ModelError(
                    f"a parameter of shape {list(parameter.shape)} has a gradient that is not kept in step: it was "
                    "frozen, or not part of the model, when tulle.distribute was called: unfreeze and complete the "
                    "model before"
                )

    def __reduce_ex__(self, protocol: object) -> tuple[object, ...]:
        """A copied or pickled parameter carries no engine along."""
        return type(None), ()

    def _arrived(self, slot: Slot) -> None:
        """A gradient is complete."""
        slot.is_fired = True
        if self._non_finite is not None:
            self._non_finite.look(slot.name, slot.parameter.grad)
        if not self._is_syncing:
            compact(slot.parameter)
            return
        backward = torch._C._current_graph_task_id()
        if backward != self._backward:
            self._backward = backward
            traffic.step = self.steps + 1
            _join_backward(backward, self)
        if self._items:
            item, position = self._places[slot.name]
            item.arrive(position)
            self._advance(at_end=False)
        elif self.axis.size > 1:
            self._first_order.append(slot.name)

    def end_backward(self) -> None:
        """All gradients are there: submit what has not been, and wait for everything."""
        self._backward = _NOT_RUNNING
        self.steps += 1
        if self.axis.size > 1:
            if not self._items:
                self._fix_order()
            self._advance(at_end=True)
            self._submitted = 0
            # Tables first: they have rounds to go and sums to make, while buckets are under way by themselves.
            for item in sorted(self._items, key=lambda item: item is not self.table_sync):
                item.finish()
        if self._non_finite is not None:  # after the sums, so that the next backward finds nothing under way
            self._non_finite.raise_if_any(self.steps)

    def _advance(self, *, at_end: bool) -> None:
        """Submit, in the one order, whatever is complete; at the end of backward, everything."""
        while self._submitted < len(self._items):
            item = self._items[self._submitted]
            if item.missing and not at_end:
                return
            item.start()
            self._submitted += 1

    def _fix_order(self) -> None:
        """After the first backward: find the tables, and lay out buckets in the order of rank 0's gradients."""
        gradients = {name: slot.parameter.grad for name, slot in self._slots.items()}
        kinds = {name: gradient.layout for name, gradient in gradients.items() if gradient is not None}
        heard = gather_values((self._first_order, kinds), self.axis, label="the order of gradients")
        found = {(name, layout) for _, layouts in heard for name, layout in layouts.items()}
        self._tables |= {name for name, layout in found if layout == torch.sparse_coo}
        # Tied to an output layer, say: a sparse and a dense gradient add up to a dense one, here or elsewhere.
        self._tables -= {name for name, layout in found if layout == torch.strided}
        order = list(dict.fromkeys([*heard[0][0], *reversed(self._slots)]))
        place = {name: number for number, name in enumerate(order)}
        dense = [self._slots[name] for name in order if name not in self._tables]
        laid_out = list(lay_out(dense, self._bucket_bytes)) or ([[]] if len(self._buffers) else [])
        buckets = [Bucket(slots, self.axis) for slots in laid_out[:-1]]
        buckets += [Bucket(slots, self.axis, self._buffers if len(self._buffers) else None) for slots in laid_out[-1:]]
        self._items = [*buckets]
        if self._tables:
            self.table_sync = self._sync_tables()
            last_table = max(place[name] for name in self._tables)
            turn = sum(all(place[slot.name] < last_table for slot in bucket.slots) for bucket in buckets)
            self._items.insert(turn, self.table_sync)
        self._places = {slot.name: (item, position) for item in self._items for position, slot in enumerate(item.slots)}

    def _sync_tables(self) -> TableSync:
        return TableSync(
            [slot for name, slot in self._slots.items() if name in self._tables],
            self.axis,
            network=probe(self.home),
            schemes=self._schemes,
            renormalize=self._renormalize,
        )


_alive: WeakSet[DataParallel] = WeakSet()
_joined: dict[int, WeakSet[DataParallel]] = {}
"""Engines whose parameters have had a gradient, by the backward that is running."""


def engine_of(owner: nn.Module | Tensor) -> DataParallel | None:
    """The engine that keeps a model, or one parameter, in step, or None."""
    return getattr(owner, ENGINE, None)


def _arrived(engine: ref[DataParallel], name: str, parameter: Tensor) -> None:
    alive = engine()
    if alive is not None:
        alive._arrived(alive._slots[name])


def _join_backward(backward: int, engine: DataParallel) -> None:
    """Have an engine end with this backward.

    All that take part end together, in the order of their numbers, because each rank's graph calls back in its own.
    """
    if backward not in _joined:
        _joined[backward] = WeakSet()
        Variable._execution_engine.queue_callback(partial(_end_of_backward, backward))
    _joined[backward].add(engine)


def _end_of_backward(backward: int) -> None:
    for engine in sorted(_joined.pop(backward), key=lambda engine: engine.number):
        engine.end_backward()


def _free_number(axis: Axis) -> int:
    """The smallest number that no living engine has on any rank. Every rank of the axis must call it."""
    mine = {engine.number for engine in _alive if engine.home.group is axis.group}
    taken = set().union(*gather_values(mine, axis, label="the model's number"))
    return next(number for number in count() if number not in taken)
