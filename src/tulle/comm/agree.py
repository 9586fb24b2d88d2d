"""Agreement between ranks on small values and on errors, so that all raise alike and nobody is left waiting."""

from __future__ import annotations

from typing import TypeVar

import torch.distributed as dist

from tulle.comm.lane import on_host
from tulle.comm.pending import Exchange, translated
from tulle.errors import CommunicationError, TulleError
from tulle.mesh import Axis

T = TypeVar("T")


def gather_values(value: T, axis: Axis, *, label: str) -> list[T]:
    """Every rank's value, in the order of ranks; any value that pickles. For set-up, not for the hot path.

    Every rank of the axis must call it, with the same label. It goes by gloo, whatever the axis computes on: ranks that
    have come for an exchange of tensors instead would give nccl another length, for which it reads past the memory.

    Args:
        value: This rank's.
        axis: Whose ranks tell each other.
        label: What it is about.

    Raises:
        CommunicationError: On every rank, if they came here for different things.
    """
    if axis.size == 1:
        return [value]
    told: list[tuple[str, T]] = [(label, value)] * axis.size
    group = axis.group if axis.device.type == "cpu" else on_host(axis, "agreement").group
    with translated(Exchange("agreement", axis, label, 0, 0)):
        dist.all_gather_object(told, (label, value), group=group)
    first = told[0][0]
    for rank, (theirs, _) in enumerate(told):
        if theirs != first:
            raise CommunicationError(
                f"rank {rank} of axis {axis.name!r} has come to agree on {theirs!r}, rank 0 on {first!r}: all ranks "
                "must call the same functions of tulle in the same order, also after an error that one has caught"
            )
    return [value for _, value in told]


def raise_together(error: TulleError | None, axis: Axis, *, label: str) -> None:
    """Raise on every rank what the lowest failing rank found. Every rank of the axis must call it.

    Args:
        error: What this rank found, or None.
        axis: Whose ranks must agree.
        label: What is being checked.
    """
    for rank, found in enumerate(gather_values(error, axis, label=label)):
        if found is not None:
            if rank == axis.rank and error is not None:
                raise error  # itself: a copy would be told behind it
            raise type(found)(f"rank {rank}: {found}")
