"""`PersistentAllReduce`: the sparse gradient of one parameter, step after step; few rows travel in packets.

Of a gradient that it has never seen `tulle.sync.all_reduce` first tells shape, dtype and rows, then row numbers, then
values. Where the same parameter's comes again, as in each step of DDP, one message can hold all (`tulle.sync.packet`).
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
from tulle.sync.packet import Packet, Room, next_packet
from tulle.sync.reduce import Gradient, count, sum_gradients
from tulle.sync.schemes import AUTO
from tulle.sync.table import WireDtype, as_wire_dtype


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
    _chooser: Chooser | None = None
    _room: Room = field(default_factory=Room)
    _packet: Packet | None = None
    """In which rows travel next; None where they go by a scheme."""

    @torch.no_grad()
    def mean(self, gradient: Tensor) -> Tensor:
        """As `tulle.sync.all_reduce`, for sparse COO tensors. Every rank of the axis must call it."""
        if self.scheme != AUTO or gradient.sparse_dim() != 1:
            return all_reduce(gradient, self.axis, scheme=self.scheme, wire_dtype=self.wire_dtype)
        local, refusal = read(gradient)
        wire = as_wire_dtype(self.wire_dtype)
        sums: Sequence[Gradient] | None = None
        if local is None or self._packet is None:
            counts, _ = announce(local, refusal, (AUTO, "mean", wire), self.axis)
            assert local is not None, "a refused gradient was raised by all ranks"
        else:
            counts, sums = self._in_packets(local, self._packet)
        table, network, ranks = local.table(1, wire), probe(self.axis), self.axis.size
        self._chooser = self._chooser or Chooser(network, ranks)
        scheme = chosen(self._chooser, local, table, counts, self.axis)
        if sums is None:
            mine = local.scaled(1.0 / ranks, table)
            sums = sum_gradients([mine], [table], [[rows] for rows in counts], [scheme], self.axis).wait()
        self._room.fill(counts)
        scheme_s = self._chooser.predicted_s
        self._packet = next_packet([table], [([0], self._room)], network, ranks, words=1, scheme_s=scheme_s)
        return cast("Tensor", as_given(gradient, sums[0], local.shape, 1))

    def _in_packets(self, local: Local, packet: Packet) -> tuple[list[int], Sequence[Gradient] | None]:
        """Rows of each rank, and their mean, None if those of some rank do not fit."""
        mine = local.scaled(1.0 / self.axis.size, packet.tables[0])
        exchanged = packet.exchange([count(mine)], [mine], self.axis).wait()
        heard = exchanged.words()
        return [rows for [rows] in heard], exchanged.sum(heard)
