"""`channels_of`: a channel to each other rank of an axis, through whatever the two of them share."""

from __future__ import annotations

import atexit
from dataclasses import replace

from tulle.errors import CommunicationError
from tulle.mesh import Axis
from tulle.pipeline.channel import Channel
from tulle.pipeline.through_gloo import ThroughGloo, await_readers, have_read
from tulle.pipeline.through_memory import ThroughMemory
from tulle.pipeline.through_nccl import by_nccl
from tulle.process_groups import new_group
from tulle.shared_memory import one_way

_PATIENT_S = 7 * 24 * 3600.0
"""gloo's own time-out: a rank from which nothing comes for long is not late until a program waits for it."""


def channels_of(axis: Axis) -> dict[int, Channel]:
    """A channel to each other rank of an axis, by its rank, ascending. Every rank of the axis must call it."""
    if axis.size == 1:
        return {}
    # Always gloo: a receiver does not know what comes next, which nccl wants it to.
    group = new_group(axis.ranks, _PATIENT_S, purpose=f"{axis.name}, messages", backend="gloo")
    lane = replace(axis, group=group, lanes={}, measured=[], kept={})
    have_read(lane.ranks)  # they have come to here, and have read what they wanted of earlier meshes
    atexit.unregister(await_readers)
    atexit.register(await_readers)  # runs before what ends the process groups, which was registered earlier
    try:
        ends = one_way(group, axis.ranks, axis.timeout_s)
    except OSError as error:
        raise CommunicationError(f"rank {axis.rank} of axis {axis.name!r} does not reach another: {error}") from error
    channels: dict[int, Channel] = {
        place: ThroughMemory(lane, *ends[rank]) if rank in ends else ThroughGloo(lane, place)
        for place, rank in enumerate(axis.ranks)
        if place != axis.rank
    }
    return by_nccl(axis, channels, lane)
