"""`scatter_sums`: what ranks have for each other is summed where it is to be: a reduce-scatter of unlike parts.

over all           each rank sends each other its part, and sums what it gets
in two levels      ranks of a host send what is for those of a place, on any host, to the one of theirs that has it; it
                   sums, and sends the sums to the ranks of its place: what goes between hosts goes there once

Messages end with a mark, by which ranks know that they are at the same exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tulle.comm import all_to_all_parts, has_levels, hosts_of, ranks_by_host
from tulle.mesh import Axis

Message = Callable[[Sequence[int]], Tensor]
"""Of what is for some ranks one flat tensor, one rank's after the other's, each with a mark behind."""


@dataclass(frozen=True, slots=True, eq=False)
class Sums:
    """What a rank has of all ranks' messages.

    Args:
        sums: `[length]`, in single precision at least.
        marks: `[told_by]`, the marks of messages that came; -1 of a rank whose own host's were not all alike.
        told_by: The rank whose mark each is.
    """

    sums: Tensor
    marks: Tensor
    told_by: Sequence[int]


def scatter_sums(message: Message, lengths: Sequence[int], axis: Axis, *, dtype: torch.dtype, label: str) -> Sums:
    """Sum what all ranks have for this one. Every rank of the axis must call it.

    Args:
        message: What this rank has for others.
        lengths: Of what is for each rank, its mark included; the same on all ranks.
        axis: Whose ranks take part.
        dtype: Of messages.
        label: What it is for.
    """
    # Sums go on to other hosts in the dtype in which they came: those of half precision would be rounded twice.
    if dtype == _wide(dtype) and has_levels(axis):
        return _in_levels(message, lengths, axis, label)
    outgoing = [message([rank]) for rank in range(axis.size)]
    sums, marks = _summed(all_to_all_parts(outgoing, [lengths[axis.rank]] * axis.size, axis, label=label).wait(), axis)
    return Sums(sums, marks, range(axis.size))


def _in_levels(message: Message, lengths: Sequence[int], axis: Axis, label: str) -> Sums:
    inside, across = hosts_of(axis)
    hosts = ranks_by_host(axis)
    if inside is None or across is None:
        raise AssertionError("hosts are alike where there are levels")
    of_place = [ranks[inside.rank] for ranks in hosts]
    outgoing = [message([ranks[place] for ranks in hosts]) for place in range(inside.size)]
    of_hosts = [lengths[rank] for rank in of_place]
    incoming = all_to_all_parts(outgoing, [sum(of_hosts)] * inside.size, inside, label=label).wait()
    parts = incoming.view(inside.size, -1).split(of_hosts, dim=1)
    own_mark = parts[across.rank][inside.rank, -1:]
    marks_here = parts[across.rank][:, -1]
    told = torch.where((marks_here == own_mark).all(), own_mark, torch.full_like(own_mark, -1))
    partial = [torch.cat([part[:, :-1].sum(0), told]) for part in parts]
    again = all_to_all_parts(partial, [lengths[axis.rank]] * across.size, across, label=label).wait()
    sums, marks = _summed(again, across)
    here = hosts[across.rank]
    return Sums(sums, torch.cat([marks_here, marks]), [*here, *of_place])


def _summed(incoming: Tensor, axis: Axis) -> tuple[Tensor, Tensor]:
    """The sum of equal messages, in single precision at least, and their marks."""
    of_ranks = incoming.view(axis.size, -1)
    return of_ranks[:, :-1].sum(0, dtype=_wide(incoming.dtype)), of_ranks[:, -1]


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
