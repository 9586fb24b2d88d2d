"""`levels`: collectives between hosts of several ranks: within each host through memory, between hosts a share each.

    host 0   rank 0   reduces share 0 of both ── with rank 2 ── writes it to both
             rank 1   reduces share 1 of both ── with rank 3 ── writes it to both

A ring of all ranks sends `2 (n - 1) / n M` over the link of each host, this one `2 (h - 1) / h M` for h hosts, and what
stays on a host goes through no socket. Each rank sends as many bytes in either. A few bytes go round the ring, most of
whose parts are then empty, and not sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from tulle.comm.lane import across_hosts, ranks_by_host
from tulle.mesh import Axis
from tulle.parts import Reduction
from tulle.shared_memory import Work, Works, all_reduce, do_share, works_of

LEAST_BYTES = 128
"""What is smaller is reduced in a ring of all."""
_REDUCTIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


@dataclass(frozen=True, slots=True, eq=False)
class Levels:
    """The two levels of an axis.

    Args:
        inside: Exchanges among the ranks of this host.
        across: The ranks of this one's place on each host.
        hosts: Of each host its ranks on the axis, in the order of places.
    """

    inside: Works
    across: Axis
    hosts: Sequence[Sequence[int]]

    def all_reduce(self, tensor: Tensor, op: Reduction) -> Work:
        """Reduce a contiguous tensor in place over all ranks: the same bits on all of them."""

        def begin(share: Tensor) -> Callable[[], object]:
            return begin_ring(share, self.across, op).wait if len(share) else _nothing  # nor has any other of its place

        return all_reduce(self.inside, tensor, op, begin)


def begin_ring(tensor: Tensor, axis: Axis, op: Reduction) -> dist.Work:
    """Begin the backend's own all-reduce of a tensor in place, over an axis."""
    work = dist.all_reduce(tensor, op=_REDUCTIONS[op], group=axis.group, async_op=True)
    assert work is not None, "an asynchronous collective returns its work on every rank of its group"
    return work


def _nothing() -> None:
    """What is waited for where nothing was sent."""


def can_have_levels(axis: Axis) -> bool:
    """Whether ranks of one host can share memory, where an axis has several: this rank is taken for all."""
    return axis.device.type == "cpu" and do_share([axis.ranks[axis.rank]])


def has_levels(axis: Axis) -> bool:
    """Whether an axis has the two. Every rank of it must call it."""
    return levels(axis) is not None


def levels(axis: Axis) -> Levels | None:
    """The levels of an axis; None if there are no two, or not all hosts are alike. Every rank of it must call it."""
    if axis.device.type != "cpu" or axis.size == 1:
        return None
    if Levels not in axis.kept:
        axis.kept[Levels] = _levels(axis)
    return axis.kept[Levels]


def _levels(axis: Axis) -> Levels | None:
    hosts = ranks_by_host(axis)
    if len(hosts) == 1 or len(hosts[0]) == 1 or len({len(ranks) for ranks in hosts}) > 1:
        return None
    if not all(do_share([axis.ranks[rank] for rank in ranks]) for ranks in hosts):
        return None
    here = next(ranks for ranks in hosts if axis.rank in ranks)
    inside = works_of(axis.group, [axis.ranks[rank] for rank in here], axis.timeout_s)
    return None if inside is None else Levels(inside, across_hosts(axis, "levels"), hosts)
