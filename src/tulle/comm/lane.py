"""A second process group over the same ranks, so that small urgent exchanges do not queue behind large buckets."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import torch.distributed as dist

from tulle.mesh import Axis


def lane(axis: Axis, purpose: str) -> Axis:
    """The same axis on a process group of its own, made once for each purpose. Every rank of the axis must call it.

    gloo runs the collectives of a group in the order in which they came, so a few bytes wait behind 25 MB.
    """
    if axis.size == 1:
        return axis
    if purpose not in axis.lanes:
        timeout = timedelta(seconds=axis.timeout_s)
        group = dist.new_group(list(axis.ranks), timeout=timeout, use_local_synchronization=True)
        assert group is not None, "this rank is one of the group's"
        axis.lanes[purpose] = replace(axis, group=group, lanes={}, measured=[])
    return axis.lanes[purpose]
