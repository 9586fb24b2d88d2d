"""`Reducer`: averages the gradients of replicas over an axis, in buckets and in groups of tables, in one order.

    first backward     the ranks note in which order gradients come; at its end they agree on rank 0's, on which
                       parameters are tables, and on what travels together
    all that follow    what has its gradients is submitted, but not before what comes earlier in that order

Source: Li et al., *PyTorch Distributed* (VLDB'20); the word is DDP's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from tulle.comm import gather_values, lane, probe
from tulle.engine.assumed_dense import filled_rows, travel_by_rows
from tulle.engine.buckets import FIRST_BUCKET_BYTES, Bucket, lay_out
from tulle.engine.buffers import Buffers
from tulle.engine.foresight import Foresight
from tulle.engine.groups import TableGroup
from tulle.engine.late_updates import LateUpdates
from tulle.engine.ledger import Ledger
from tulle.engine.slots import Slot, Traveller
from tulle.engine.tables import TableSettings, TableSync, comes_by_rows
from tulle.engine.turns import Turns, best_piece_bytes
from tulle.mesh import Axis

GROUPED_BYTES = FIRST_BUCKET_BYTES
"""Tables travel apart if dense gradients of at least so many bytes come between theirs."""
_REORDERED_AFTER = 4
"""Backwards after which the order of these pieces is fixed; the first ones are slow."""


@dataclass(slots=True, eq=False)
class Reducer:
    """Averages the gradients of one model's replicas. Every rank makes one, of the same slots.

    Args:
        slots: The trained parameters, by name.
        axis: Whose ranks hold the replicas, with a process group of the model's own.
        home: The same axis as the mesh has it, of which the network is measured.
        tables: Names of the parameters that get sparse gradients. Others that turn out to do so join them, and those
            whose dense gradients turn out to be zero in most rows.
        settings: How the tables are kept in step.
        bucket_bytes: Size of a bucket of dense gradients.
        buffers: The model's, whose marks travel with the gradients.
        foresights: Notes of the lookups, by identity of the table.
    """

    slots: dict[str, Slot]
    axis: Axis
    home: Axis
    tables: set[str]
    settings: TableSettings
    bucket_bytes: int
    buffers: Buffers
    foresights: Mapping[int, Foresight]
    ledger: Ledger = field(init=False, default_factory=Ledger)
    """What is known of the tables."""
    table_sync: TableSync | None = field(init=False, default=None)
    """The run-time of the tables, from the first backward on."""
    groups: list[TableGroup] = field(init=False, default_factory=list)
    """Tables that travel together, from the first backward on."""
    dense_tables: set[str] = field(init=False, default_factory=set)
    """Names of those of the tables whose gradients are dense, from the first backward on."""
    _first_order: list[str] = field(init=False, default_factory=list)
    """In which the gradients of the first backward have come here."""
    _items: list[Traveller] = field(init=False, default_factory=list)
    """Buckets and groups, in the one order."""
    _places: dict[str, tuple[Traveller, int]] = field(init=False, default_factory=dict)
    """In which of these each slot is, and where."""
    _turns: Turns = field(init=False, default_factory=Turns)
    _put_off: list[Slot] = field(init=False, default_factory=list)
    """Whose gradients came in this backward and are taken in at its end, as hooks behind ours leave them."""

    @property
    def writes(self) -> int:
        """How often something was written to any of the gradients."""
        return sum(item.writes for item in self._items)

    def begin_backward(self) -> None:
        """A backward has begun."""
        self._put_off.clear()
        self._turns.begin()

    def arrive(self, slot: Slot) -> None:
        """A gradient is complete: submit what can be."""
        if not self._items:
            if self.axis.size > 1:
                self._first_order.append(slot.name)
                self._put_off.append(slot)
        elif slot.lets_others_first():
            self._put_off.append(slot)
        else:
            item, position = self._places[slot.name]
            item.arrive(position)
            if not item.missing:  # spares a call for each of many parameters
                self._turns.arrived(item)

    def foresee_looked_up(self, step: int) -> None:
        """Tell the other ranks the rows of groups whose tables have all been looked up in.

        All ranks tell the groups in one order, each once a step. What another forward, without a backward, makes one
        of them tell is found to be wrong when the gradients come.
        """
        for group in self.groups:
            if not group.is_foreseen:
                if not group.is_looked_up:
                    return
                self._foresee(group, step)

    def foresee_all(self, step: int) -> None:
        """Tell the other ranks the rows of all groups that have not been told."""
        for group in self.groups:
            self._foresee(group, step)

    def submit_all(self, step: int, *, is_late: bool) -> None:
        """All gradients are there: submit what has not been. Every rank must call it.

        Args:
            step: Of which the backward is.
            is_late: Whether updates wait until their parameters are read.
        """
        put_off, self._put_off = self._put_off, []
        for slot in put_off:
            slot.check_there()
        if not self._items and (self.slots or len(self.buffers)):
            self._fix_order(step, is_late=is_late)
        self._turns.end()

    def finish(self, step: int, late: LateUpdates | None) -> None:
        """Wait for what was submitted, but for what may wait until it is read."""
        # Tables first: what a bucket waits for is then there.
        in_turn = sorted(self._items, key=lambda item: not isinstance(item, TableGroup))
        for item in in_turn if late is None else self._postponed(in_turn, step, late):
            item.finish()
        for foresight in self.foresights.values():  # also of a table that turned out to get dense gradients
            foresight.forget()

    def _foresee(self, group: TableGroup, step: int) -> None:
        assert self.table_sync is not None, "groups have what their tables share"
        self.table_sync.begin_step(step)
        group.foresee()

    def _postponed(self, items: Sequence[Traveller], step: int, late: LateUpdates) -> list[Traveller]:
        """Have buckets waited for when their gradients or parameters are read; give what must be waited for now."""
        if step == _REORDERED_AFTER:
            self._turns.reorder(late.read, self.axis, probe(self.home))
        late.begin()
        now: list[Traveller] = []
        for item in items:
            if isinstance(item, Bucket) and late.takes(item):
                late.postpone(item)
            else:
                now.append(item)
        return now

    def _fix_order(self, step: int, *, is_late: bool) -> None:
        """After the first backward: find the tables, and lay out buckets in the order of rank 0's gradients."""
        gradients = {name: slot.parameter.grad for name, slot in self.slots.items()}
        kinds = {name: comes_by_rows(gradient) for name, gradient in gradients.items() if gradient is not None}
        filled = filled_rows({name: one for name, one in gradients.items() if one is not None})
        heard = gather_values((self._first_order, kinds, filled), self.axis, label="the order of gradients")
        found = {kind for _, by_rows, _ in heard for kind in by_rows.items()}
        self.tables |= {name for name, by_rows in found if by_rows}
        # Tied to an output layer, say: a sparse and a dense gradient add up to a dense one, here or elsewhere.
        self.tables -= {name for name, by_rows in found if not by_rows}
        self._take_dense_tables([told for _, _, told in heard])
        order = list(dict.fromkeys([*heard[0][0], *reversed(self.slots)]))
        place = {name: number for number, name in enumerate(order)}
        dense = [self.slots[name] for name in order if name not in self.tables]
        self._items = [*(self._late_buckets(dense) if is_late else self._buckets(dense))]
        if self.tables:
            self.table_sync, self.groups = self._sync_tables(order, step)
        for group in self.groups:
            last_table = max(place[slot.name] for slot in group.slots)
            turn = sum(all(place[slot.name] < last_table for slot in item.slots) for item in self._items)
            self._items.insert(turn, group)
        self._places = {slot.name: (item, position) for item in self._items for position, slot in enumerate(item.slots)}
        self._turns = Turns(self._items)

    def _take_dense_tables(self, told: Sequence[Mapping[str, int]]) -> None:
        """Have dense gradients travel by rows where that is faster."""
        if any(told):
            found = travel_by_rows(told, self.slots, self.settings, probe(self.home), says=self.axis.rank == 0)
            self.dense_tables = found - self.tables
            self.tables |= self.dense_tables

    def _buckets(self, slots: Sequence[Slot]) -> list[Bucket]:
        """Buckets of which the last carries the marks of the buffers."""
        laid_out = list(lay_out(slots, self.bucket_bytes)) or ([[]] if len(self.buffers) else [])
        buckets = [Bucket(slots, self.axis) for slots in laid_out[:-1]]
        buckets += [Bucket(slots, self.axis, self.buffers if len(self.buffers) else None) for slots in laid_out[-1:]]
        return buckets

    def _late_buckets(self, slots: Sequence[Slot]) -> list[Bucket]:
        """Small buckets, which are waited for one by one, on a lane of their own, where nobody waits behind them."""
        network = probe(self.home)  # while nothing else is under way
        own = lane(self.axis, "late updates")
        piece_bytes = min(self.bucket_bytes, best_piece_bytes(network, self.axis.size))
        marks = [Bucket([], self.axis, self.buffers)] if len(self.buffers) else []
        return [Bucket(part, own, piece_bytes=piece_bytes) for part in lay_out(slots, piece_bytes)] + marks

    def _sync_tables(self, order: Sequence[str], step: int) -> tuple[TableSync, list[TableGroup]]:
        # What a wire dtype is asked for are sparse gradients.
        settings = replace(self.settings, exact=self.dense_tables)
        sync = TableSync(self.axis, probe(self.home), settings, self.ledger)
        sync.begin_step(step)
        groups: list[list[Slot]] = []
        dense_bytes, was_unforeseen = GROUPED_BYTES, False
        for name in order:
            slot = self.slots[name]
            if name not in self.tables:
                dense_bytes += slot.parameter.nbytes
                continue
            # What no module looks up is foreseen by nobody, and would keep the others from being told ahead.
            is_unforeseen = name in self.dense_tables and id(slot.parameter) not in self.foresights
            if dense_bytes >= GROUPED_BYTES or is_unforeseen != was_unforeseen:
                groups.append([])
            groups[-1].append(slot)
            dense_bytes, was_unforeseen = 0, is_unforeseen
        return sync, [TableGroup(group, sync, self.foresights, self.dense_tables) for group in groups]
