"""`TableSync`: what the tables of one model share: the thread that sums them, and the choice of each one's scheme.

Every rank hears the same counts, so every rank makes the same choice, and nobody has to ask. What happens when during a
step is in `tulle.engine.groups`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial

import torch
from torch import Tensor, nn

from tulle.comm import BackgroundThread, Deferred, all_gather, lane, traffic
from tulle.cost import Characteristics, Network
from tulle.engine.bundle import Bundle
from tulle.engine.ledger import Ledger
from tulle.engine.meter import Meter
from tulle.engine.slots import Slot
from tulle.mesh import Axis
from tulle.rows import RowSparse
from tulle.sync import (
    ABSENT,
    AUTO,
    COUNTS,
    DENSE,
    Choice,
    Chooser,
    Gradient,
    Packet,
    Routes,
    Table,
    announce_counts,
    choose_together,
    count,
    gather_presence,
    indices_of,
    next_packet,
    route,
)
from tulle.sync.packet import WORDS

logger = logging.getLogger("tulle")

_OBSERVED_EVERY = 500
"""Gradients are measured at steps 1, 2, 4, 8, ... and then in every one of so many: that is under 0.5% of the time."""


@dataclass(frozen=True, slots=True)
class TableSettings:
    """How a model's tables are kept in step.

    Args:
        schemes: A scheme's name by parameter name; `"auto"`, or absent, means chosen by measured rows.
        renormalize: By parameter name, what an embedding with `max_norm` does to the rows that any rank looked up.
        wire_dtype: In which values travel; None for their own.
        exact: Names of tables whose values travel in their own dtype all the same.
        observe_every: Measure the gradients in every one of so many steps; 0 for seldom.
    """

    schemes: Mapping[str, str] = field(default_factory=dict)
    renormalize: Mapping[str, Callable[[Tensor], None]] = field(default_factory=dict)
    wire_dtype: torch.dtype | None = None
    exact: Collection[str] = ()
    observe_every: int = 0


class TableSync:
    """What the tables of one model on one axis share.

    Args:
        axis: Whose ranks hold replicas.
        network: What the axis gives, the same numbers on all ranks.
        settings: How they are kept in step.
        ledger: Takes up what is known of them.
    """

    def __init__(self, axis: Axis, network: Network, settings: TableSettings, ledger: Ledger) -> None:
        self.axis = axis
        # On a group of their own, so that a few rows do not wait behind the buckets that are under way.
        self._lane = lane(axis, "tables")
        self.background = BackgroundThread("tulle tables", axis.device)
        self.network = network
        self.settings = settings
        self.ledger = ledger
        self._bundles, self._meters = ledger.bundles, ledger.meters
        ledger.network = network
        self._step = 0
        self._is_observed = False

    def form_bundles(self, slots: Sequence[Slot]) -> None:
        """Have tables that are summed together travel as one, where width, dtype and what was given allow it."""
        bundles: dict[object, Bundle] = {}
        for slot in slots:
            parameter, given = slot.parameter, self.settings.schemes.get(slot.name, AUTO)
            chooser = Chooser(self.network, self.axis.size) if given == AUTO else None
            kind = given, parameter.shape[1], parameter.dtype, slot.name in self.settings.exact
            self._bundles[slot.name] = bundles.setdefault(kind, Bundle(given, chooser))
            self._meters[slot.name] = Meter()

    def scheme(self, name: str) -> str:
        """The scheme in force for a table: given, chosen, or `"auto"` before the first choice."""
        return self._bundles[name].scheme

    def begin_step(self, step: int) -> None:
        """Note that a backward begins."""
        self._step = step
        every = self.settings.observe_every or _OBSERVED_EVERY
        is_early = not self.settings.observe_every and step & (step - 1) == 0
        self._is_observed = step % every == 0 or is_early or step == 1

    def settle(self, indices: Sequence[Tensor | None], counts: Sequence[int], slots: Sequence[Slot]) -> Routes:
        """Tell counts and row numbers of some tables, having chosen their schemes. Every rank must call it.

        Args:
            indices: This rank's distinct rows by table, ascending; None where it has none.
            counts: What this rank announces of each.
            slots: The tables.
        """
        told = announce_counts(self._words(counts, slots), self._lane).wait()
        return self._route(indices, self._hear(told, indices, slots), slots)

    def packet(self, slots: Sequence[Slot], last: Packet | None) -> Packet | None:
        """In which some tables' gradients should travel next, the same on all ranks.

        Args:
            slots: The tables.
            last: That in which they travelled in this step, if they did.

        Returns:
            None where they go the way of their scheme: it was given, or is no slower by prediction.
        """
        members: dict[Bundle, list[int]] = {}
        for position, slot in enumerate(slots):
            members.setdefault(self._bundles[slot.name], []).append(position)
        predicted_s = [bundle.chooser.predicted_s if bundle.chooser else 0.0 for bundle in members]
        packet = next_packet(
            [self._table(slot) for slot in slots],
            [(positions, bundle.room) for bundle, positions in members.items()],
            self.network,
            self.axis.size,
            words=WORDS * len(slots),
            scheme_s=sum(predicted_s) if all(predicted_s) else 0.0,
            last=last,
        )
        for bundle in members:
            bundle.packet_s = packet.seconds(self.network, self.axis.size) if packet else 0.0
        return packet

    def sum_in_packet(self, gradients: Sequence[Gradient], slots: Sequence[Slot], packet: Packet) -> Sequence[Gradient]:
        """Sum some tables' gradients by one exchange, or, where some rank's do not fit, by their schemes.

        Every rank must call it.

        Args:
            gradients: This rank's, coalesced.
            slots: The tables.
            packet: What `packet` gave.
        """
        words = self._words([count(gradient) for gradient in gradients], slots)
        exchanged = packet.exchange(words, gradients, self._lane).wait()
        indices = indices_of(gradients)
        heard = self._hear(exchanged.words(), indices, slots)
        sums = exchanged.sum(heard)
        return self._route(indices, heard, slots).sum(gradients).wait() if sums is None else sums

    def confirm(self, words: Sequence[bool | Tensor]) -> Deferred[bool]:
        """Whether all ranks' gradients have the rows that were told. Every rank must call it.

        Args:
            words: What must be true here; tensors `[]` are on the device still, and are not waited for.
        """
        word = torch.full((1,), all(one for one in words if isinstance(one, bool)), device=self._lane.device)
        for one in words:
            word = word if isinstance(one, bool) else word & one
        heard = all_gather(word, self._lane, label=COUNTS)
        return Deferred(lambda: bool(heard.wait().all()))

    def note(self, slots: Sequence[Slot], seconds: float) -> None:
        """Keep what this rank sent for these tables in the step that ends, and how long their exchange took."""
        for slot in slots:
            self._meters[slot.name].note(self.scheme(slot.name), traffic.sent_for(slot.name), seconds)

    def _words(self, counts: Sequence[int], slots: Sequence[Slot]) -> list[int]:
        """What this rank tells of each table: its count of rows, and what the last step sent and took."""
        meters = [self._meters[slot.name] for slot in slots]
        return [*counts, *(meter.bytes_sent for meter in meters), *(meter.took_us for meter in meters)]

    def _hear(
        self, told: Sequence[Sequence[int]], indices: Sequence[Tensor | None], slots: Sequence[Slot]
    ) -> list[Sequence[int]]:
        """Take note of what all ranks told, choose schemes where they are due, and give the counts."""
        heard = [words[: len(slots)] for words in told]
        # By column: what all ranks sent for each table in the last step, and how long it took them.
        columns = [*zip(*(words[len(slots) :] for words in told), strict=True)]
        for slot, sent, took in zip(slots, columns[: len(slots)], columns[len(slots) :], strict=True):
            self._meters[slot.name].hear(sent, took)
        self._observe(indices, [self._table(slot) for slot in slots], heard)
        return heard

    def _route(self, indices: Sequence[Tensor | None], heard: Sequence[Sequence[int]], slots: Sequence[Slot]) -> Routes:
        schemes = [self.scheme(slot.name) for slot in slots]
        return route(indices, [self._table(slot) for slot in slots], heard, schemes, self._lane).wait()

    def _table(self, slot: Slot) -> Table:
        parameter = slot.parameter
        return Table(
            slot.name,
            *parameter.shape,
            dtype=parameter.dtype,
            device=parameter.device,
            wire_dtype=None if slot.name in self.settings.exact else self.settings.wire_dtype,
        )

    def _observe(
        self, indices: Sequence[Tensor | None], tables: Sequence[Table], heard: Sequence[Sequence[int]]
    ) -> None:
        """Keep the running means of rows; measure the gradients when it is time, or a choice is due."""
        held = {t: [max(0, rows[t]) for rows in heard] for t in range(len(tables)) if _is_sparse(heard, t)}
        bundles: dict[Bundle, list[int]] = {}
        for t in held:
            bundles.setdefault(self._bundles[tables[t].name], []).append(t)
        for bundle, members in bundles.items():
            bundle.room.fill([sum(rows) for rows in zip(*(held[t] for t in members), strict=True)])
        for t in {*range(len(tables))} - held.keys():
            self._bundles[tables[t].name].room.fullest_rows = 0.0
        due = {
            bundle for bundle, members in bundles.items() if bundle.is_due({tables[t].name: held[t] for t in members})
        }
        seen = {bundle: members for bundle, members in bundles.items() if self._is_observed or bundle in due}
        if not seen:
            return
        looks = self._look(indices, tables, held, [t for members in seen.values() for t in members])
        for bundle, members in seen.items():
            of_members = {tables[t].name: looks[t] for t in members}
            chosen = self._choose(bundle, of_members) if bundle in due else None
            if self._is_observed:
                self._keep(of_members, chosen)

    def _look(
        self,
        indices: Sequence[Tensor | None],
        tables: Sequence[Table],
        held: Mapping[int, Sequence[int]],
        seen: Sequence[int],
    ) -> dict[int, Characteristics]:
        """Tell row numbers of some tables, all or a sample, to know what their gradients look like."""
        empty = tables[0].empty().indices
        numbers = [empty if (part := indices[t]) is None else part for t in seen]
        counts = [[held[t][rank] for t in seen] for rank in range(self.axis.size)]
        presences = gather_presence(numbers, [tables[t] for t in seen], counts, self._lane)
        return {t: tables[t].characteristics(held[t], presence) for t, presence in zip(seen, presences, strict=True)}

    def _choose(self, bundle: Bundle, looks: Mapping[str, Characteristics]) -> list[Choice]:
        assert bundle.chooser is not None, "a scheme that was given is not due"
        before = bundle.scheme
        choices = bundle.chooser.choose([*looks.values()])
        bundle.choices.update(zip(looks, choices, strict=True))
        if not bundle.packet_s and before != bundle.scheme and self.axis.rank == 0:
            for name, choice in zip(looks, choices, strict=True):
                logger.info("table %s: %s", name, choice.reason)
        return choices

    def _keep(self, looks: Mapping[str, Characteristics], chosen: Sequence[Choice] | None) -> None:
        """Have the ledger keep looks, and what was chosen by them, or, if nothing was due, would be."""
        weigh = cache(partial(choose_together, [*looks.values()], self.network, self.axis.size))
        for place, (name, seen) in enumerate(looks.items()):
            self.ledger.observe(self._step, name, seen, lambda place=place: (chosen or weigh())[place])


def _is_sparse(heard: Sequence[Sequence[int]], position: int) -> bool:
    """Whether a table's gradient comes by rows in this step, and any rank has some."""
    counts = [rows[position] for rows in heard]
    return DENSE not in counts and any(n != ABSENT for n in counts)


def comes_by_rows(gradient: Tensor) -> bool:
    """Whether a gradient is sparse as that of a table is: rows of a matrix."""
    return gradient.layout == torch.sparse_coo and gradient.dim() == 2 and gradient.sparse_dim() == 1


def compact(parameter: nn.Parameter) -> None:
    """Coalesce a sparse gradient in place, so that accumulation over micro-batches keeps one row for each number."""
    gradient = parameter.grad
    if gradient is not None and comes_by_rows(gradient) and not gradient.is_coalesced():
        parameter.grad = RowSparse.from_tensor(gradient).coalesce().to_sparse_coo()
