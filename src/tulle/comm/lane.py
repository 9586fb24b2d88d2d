"""Further process groups over the same ranks, so that small exchanges do not queue behind large ones, or over some."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from tulle.comm.pending import Exchange, translated
from tulle.mesh import Axis
from tulle.process_groups import new_group


def lane(axis: Axis, purpose: str) -> Axis:
    """The same axis on a process group of its own, made once for each purpose. Every rank of the axis must call it.

    gloo runs the collectives of a group in the order in which they came, so a few bytes wait behind 25 MB.
    """
    if axis.size == 1:
        return axis
    if purpose not in axis.lanes:
        group = _group(axis, purpose, axis.ranks)
        # What is known of the axis now is known on all ranks, and holds here; what is measured later may come to some
        # ranks while an exchange of this lane is under way on another thread.
        axis.lanes[purpose] = replace(axis, group=group, lanes={}, measured=[*axis.measured], kept={})
    return axis.lanes[purpose]


def on_host(axis: Axis, purpose: str) -> Axis:
    """As `lane`, for numbers that are on the host, whatever the axis computes on: by gloo. Every rank must call it.

    For a thread beside training: what two threads begin on a GPU has no order that all ranks share, as nccl wants it.
    """
    if axis.size == 1 or axis.device.type == "cpu":
        return lane(axis, purpose)
    key = f"{purpose}, on hosts"
    if key not in axis.lanes:
        group = _group(axis, key, axis.ranks, backend="gloo")
        axis.lanes[key] = replace(axis, group=group, device=torch.device("cpu"), lanes={}, measured=[], kept={})
    return axis.lanes[key]


def _part(axis: Axis, purpose: str, members: Sequence[int]) -> Axis:
    """Some ranks of an axis as an axis of their own, made once. Every one of them must call it, with the same members.

    Args:
        axis: The axis.
        purpose: Of the lane.
        members: Ranks on the axis, this one among them, ascending.
    """
    key = f"{purpose} {list(members)}"
    if key not in axis.lanes:
        ranks = tuple(axis.ranks[r] for r in members)
        group = _group(axis, purpose, ranks)
        hosts = tuple(axis.hosts[r] for r in members) if axis.hosts else ()
        axis.lanes[key] = Axis(
            axis.name, list(members).index(axis.rank), len(ranks), ranks, group, axis.device, axis.timeout_s, hosts
        )
    return axis.lanes[key]


def _group(axis: Axis, purpose: str, ranks: Sequence[int], backend: str | None = None) -> dist.ProcessGroup:
    # By the group that it is of: threads make those of two lanes in any order.
    name = f"{axis.name}, {purpose} of {axis.group.group_name}"
    with translated(Exchange("connecting", axis, purpose, 0, 0)):
        return new_group(ranks, axis.timeout_s, purpose=name, backend=backend)


def alone(axis: Axis) -> Axis:
    """This rank of an axis as an axis of its own, along which nobody is to be talked to."""
    return replace(axis, rank=0, size=1, ranks=(axis.ranks[axis.rank],), hosts=(), lanes={}, measured=[], kept={})


def hosts_of(axis: Axis) -> tuple[Axis | None, Axis | None]:
    """The ranks on this host, and those of the same place on the other hosts, as axes. Every rank must call it.

    Returns:
        The two, or None twice if hosts have different numbers of ranks. An axis whose hosts are not known has one
        rank a host.
    """
    by_host = ranks_by_host(axis)
    if len({len(ranks) for ranks in by_host}) > 1:
        return None, None
    here = next(ranks for ranks in by_host if axis.rank in ranks)
    return _among(axis, "inside", here), _among(axis, "across", _of_own_place(axis))


def across_hosts(axis: Axis, purpose: str) -> Axis:
    """The ranks of this one's place on each host, on a process group of their own, made once.

    Every rank must call it. Hosts must have as many ranks each.
    """
    return _part(axis, purpose, _of_own_place(axis))


def ranks_by_host(axis: Axis) -> list[list[int]]:
    """Of each host its ranks on the axis, ascending. Costs no communication."""
    by_host: dict[int, list[int]] = {}
    for rank, host in enumerate(axis.hosts or axis.ranks):
        by_host.setdefault(host, []).append(rank)
    return [*by_host.values()]


def _of_own_place(axis: Axis) -> list[int]:
    """Of each host the rank that has the place there that this one has on its own."""
    by_host = ranks_by_host(axis)
    here = next(ranks for ranks in by_host if axis.rank in ranks)
    return [ranks[here.index(axis.rank)] for ranks in by_host]


def _among(axis: Axis, purpose: str, members: Sequence[int]) -> Axis:
    if len(members) == axis.size:
        return axis
    return alone(axis) if len(members) == 1 else _part(axis, purpose, members)
