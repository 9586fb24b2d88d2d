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

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from tulle.comm import gather_values, probe, traffic
from tulle.cost import Network
from tulle.engine.buckets import Bucket, Slot, lay_out
from tulle.engine.buffers import Buffers
from tulle.engine.finite import NonFinite
from tulle.engine.replicas import broadcast_tensors
from tulle.engine.tables import TableSync, compact
from tulle.mesh import Axis
from tulle.sync import Choice

_NOT_RUNNING = -1


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
        self.axis = axis
        self.steps = 0
        """Synchronized backward passes so far."""
        self.table_sync: TableSync | None = None
        """The run-time of the tables, from the first backward on."""
        self._schemes = schemes
        self._renormalize = renormalize
        self._bucket_bytes = bucket_bytes
        self._non_finite = NonFinite(axis) if check_finite else None
        self._slots = {name: Slot(name, p) for name, p in model.named_parameters() if p.requires_grad}
        self._tables = set(tables)
        self._is_syncing = True
        self._backward = _NOT_RUNNING
        self._first_order: list[str] = []
        self._items: list[Bucket | TableSync] = []
        self._places: dict[str, tuple[Bucket | TableSync, int]] = {}
        self._submitted = 0
        self._buffers = Buffers(model)
        if axis.size > 1 or check_finite:
            for slot in self._slots.values():
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

    def _arrived(self, slot: Slot, parameter: Tensor) -> None:
        """A gradient is complete: the hook on each parameter."""
        slot.is_fired = True
        if self._non_finite is not None:
            self._non_finite.look(slot.name, parameter.grad)
        if not self._is_syncing:
            compact(slot.parameter)
            return
        backward = torch._C._current_graph_task_id()
        if backward != self._backward:
            self._backward = backward
            traffic.step = self.steps + 1
            Variable._execution_engine.queue_callback(self._end_of_backward)
        place = self._places.get(slot.name)
        if place is None:
            self._first_order.append(slot.name)
            return
        item, position = place
        item.arrive(position)
        self._advance(at_end=False)

    def _end_of_backward(self) -> None:
        self._backward = _NOT_RUNNING
        self.steps += 1
        if self.axis.size > 1:
            self._synchronize()
        if self._non_finite is not None:  # after the sums, so that the next backward finds nothing under way
            self._non_finite.raise_if_any(self.steps)

    def _synchronize(self) -> None:
        if not self._items:
            self._fix_order()
        self._advance(at_end=True)
        self._submitted = 0
        if self.table_sync is not None:
            self.table_sync.finish(self.table_sync.sum())
        moved: list[bool] = []
        for item in self._items:
            if isinstance(item, Bucket):
                moved += item.finish()
        self._share_buffers(moved)

    def _advance(self, *, at_end: bool) -> None:
        """Submit, in the one order, whatever is complete; at the end of backward, everything."""
        while self._submitted < len(self._items):
            item = self._items[self._submitted]
            if item.missing and not at_end:
                return
            if isinstance(item, Bucket) and item.marks:
                item.start(self._buffers.moved())
            else:
                item.start()
            self._submitted += 1

    def _fix_order(self) -> None:
        """After the first backward: find the tables, and lay out buckets in the order of rank 0's gradients."""
        kinds = {
            name: slot.parameter.grad.layout for name, slot in self._slots.items() if slot.parameter.grad is not None
        }
        heard = gather_values((self._first_order, kinds), self.axis, label="the order of gradients")
        found = {(name, layout) for _, layouts in heard for name, layout in layouts.items()}
        self._tables |= {name for name, layout in found if layout == torch.sparse_coo}
        # Tied to an output layer, say: a sparse and a dense gradient add up to a dense one, here or elsewhere.
        self._tables -= {name for name, layout in found if layout == torch.strided}
        order = list(dict.fromkeys([*heard[0][0], *reversed(self._slots)]))
        dense = [self._slots[name] for name in order if name not in self._tables]
        buckets = [Bucket(slots, self.axis) for slots in lay_out(dense, self._bucket_bytes)]
        if len(self._buffers):
            last = buckets.pop().slots if buckets else ()
            buckets.append(Bucket(last, self.axis, marks=len(self._buffers)))
        self._items = [*buckets]
        if self._tables:
            self.table_sync = self._sync_tables()
            last_table = max(order.index(name) for name in self._tables)
            turn = sum(all(order.index(slot.name) < last_table for slot in bucket.slots) for bucket in buckets)
            self._items.insert(turn, self.table_sync)
        self._places = {slot.name: (item, position) for item in self._items for position, slot in enumerate(item.slots)}

    def _sync_tables(self) -> TableSync:
        return TableSync(
            [slot for name, slot in self._slots.items() if name in self._tables],
            self.axis,
            network=probe(self.axis),
            schemes=self._schemes,
            renormalize=self._renormalize,
        )

    def _share_buffers(self, moved: Sequence[bool]) -> None:
        """Give every rank the buffers of rank 0 that any rank has written."""
        if any(moved):
            written = [buffer for buffer, is_moved in zip(self._buffers.current(), moved, strict=True) if is_moved]
            broadcast_tensors(written, self.axis, label="buffers")
        self._buffers.settle()


def _arrived(engine: ref[DataParallel], name: str, parameter: Tensor) -> None:
    """The hook on each parameter. It holds no engine: the garbage collector does not see through torch's hooks."""
    alive = engine()
    if alive is not None:
        alive._arrived(alive._slots[name], parameter)
