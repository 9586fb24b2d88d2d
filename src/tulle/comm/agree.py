"""Agreement between ranks on small values and on errors, so that all raise alike and nobody is left waiting."""

from __future__ import annotations

from typing import TypeVar

import torch.distributed as dist

from tulle.comm.pending import Exchange, translated
from tulle.errors import TulleError
from tulle.mesh import Axis

T = TypeVar("T")


def gather_values(value: T, axis: Axis, *, label: str) -> list[T]:
    """Every rank's value, in the order of ranks; any value that pickles. For set-up, not for the hot path.

    Every rank of the axis must call it.
    """
    values: list[T] = [value] * axis.size
    if axis.size > 1:
        with translated(Exchange("agreement", axis, label, 0, 0)):
            dist.all_gather_object(values, value, group=axis.group)
    return values


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
