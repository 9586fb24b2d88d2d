"""`PersistentAllReduce`: the sparse gradient of one parameter, step after step; few rows travel in packets.

Of a gradient that it has never seen `tulle.sync.all_reduce` first tells shape, dtype and rows, then row numbers, then
values. Where the same parameter's comes again, as in each step of DDP, one message can hold all (`tulle.sync.packet`),
and one that of several parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor

from tulle.comm import probe
from tulle.mesh import Axis
from tulle.sync.all_reduce import Local, all_reduce, announce, as_given, chosen, read
from tulle.sync.chooser import Chooser
from tulle.sync.packet import Packet, Room, Section, next_packet, room_for
from tulle.sync.reduce import Gradient, count, sum_gradients
from tulle.sync.schemes import AUTO
from tulle.sync.table import Table, WireDtype, as_wire_dtype


@dataclass(slots=True, eq=False)
class PersistentAllReduce:
    """Means over an axis of the sparse gradients of one parameter, which has one shape and dtype on all ranks.

    Args:
        axis: Whose ranks take part.
        scheme: One of `tulle.sync.SCHEMES`, or `"auto"`.
        wire_dtype: In which values travel; None loses nothing.
    """

    axis: Axis
    scheme: str = AUTO
    wire_dtype: WireDtype = None
    is_in_packets: bool = field(init=False, default=False)
    """Whether the next gradient should travel in a packet, by `means_in_packet`; the same on all ranks."""
    _chooser: Chooser | None = field(init=False, default=None)
    _room: Room = field(init=False, default_factory=Room)

    @torch.no_grad()
    def mean(self, gradient: Tensor) -> Tensor:
        """As `tulle.sync.all_reduce`, for sparse COO tensors. Every rank of the axis must call it."""
        if self.scheme != AUTO or gradient.sparse_dim() != 1:
            return all_reduce(gradient, self.axis, scheme=self.scheme, wire_dtype=self.wire_dtype)
        local, refusal = read(gradient, self.axis)
        counts, _ = announce(local, refusal, (AUTO, "mean", as_wire_dtype(self.wire_dtype)), self.axis)
        assert local is not None, "a refused gradient was raised by all ranks"
        table = self._table(local)
        mine, scheme = local.scaled(1.0 / self.axis.size, table), self._chosen(local, table, counts)
        [total] = sum_gradients([mine], [table], [[held] for held in counts], [scheme], self.axis).wait()
        self._note(table, counts)
        return cast("Tensor", as_given(gradient, total, local.shape, 1))

    def _table(self, local: Local) -> Table:
        return local.table(1, as_wire_dtype(self.wire_dtype))

    def _chosen(self, local: Local, table: Table, counts: Sequence[int]) -> str:
        self._chooser = self._chooser or Chooser(probe(self.axis), self.axis.size)
        return chosen(self._chooser, local, table, counts, self.axis)

    def _note(self, table: Table, counts: Sequence[int]) -> None:
        """Take note of the rows that each rank had: they decide how the next ones travel."""
        assert self._chooser is not None, "a scheme was chosen for them"
        self._room.fill(counts)
        rooms, network, scheme_s = [([0], self._room)], probe(self.axis), self._chooser.predicted_s
        self.is_in_packets = bool(next_packet([table], rooms, network, self.axis.size, words=1, scheme_s=scheme_s))


@torch.no_grad()
def means_in_packet(reductions: Sequence[PersistentAllReduce], gradients: Sequence[Tensor]) -> list[Tensor]:
    """Means of several parameters' gradients by one exchange; where some rank's do not fit, by their schemes.

    Every rank of the axis must call it.

    Args:
        reductions: Of each parameter, on one axis and with one `wire_dtype`; all of them are `is_in_packets`.
        gradients: This rank's.
    """
    axis = reductions[0].axis
    found = [local for local, _ in (read(gradient, axis) for gradient in gradients) if local is not None]
    assert len(found) == len(gradients), "gradients of a kind that is refused are never in packets"
    tables = [one._table(local) for one, local in zip(reductions, found, strict=True)]
    mine = [local.scaled(1.0 / axis.size, table) for local, table in zip(found, tables, strict=True)]
    exchanged = _packet(reductions, tables).exchange([count(one) for one in mine], mine, axis).wait()
    heard = exchanged.words()
    sums: Sequence[Gradient] | None = exchanged.sum(heard)
    counts = [[*held] for held in zip(*heard, strict=True)]  # of each table those of all ranks
    each = [*zip(reductions, found, tables, counts, strict=True)]
    schemes = [one._chosen(local, table, held) for one, local, table, held in each]
    if sums is None:
        sums = sum_gradients(mine, tables, heard, schemes, axis).wait()
    for one, _, table, held in each:
        one._note(table, held)
    given = zip(gradients, sums, found, strict=True)
    return [cast("Tensor", as_given(gradient, total, local.shape, 1)) for gradient, total, local in given]


def _packet(reductions: Sequence[PersistentAllReduce], tables: Sequence[Table]) -> Packet:
    """With a section for each width and dtype, which has room for what all its tables need."""
    members: dict[object, list[int]] = {}
    for t, table in enumerate(tables):
        members.setdefault((table.width, table.dtype), []).append(t)
    sections = [
        Section(some, room_for(sum(reductions[t]._room.fullest_rows for t in some))) for some in members.values()
    ]
    return Packet(tables, sections, len(tables))
