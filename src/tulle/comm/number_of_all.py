"""`number_of_all`, `meet_to_read`: what is asked of all ranks' parts of a tensor no rank asks for alone unnoticed."""

from __future__ import annotations

from torch import Tensor

from tulle.comm.collectives import all_reduce
from tulle.comm.differentiable import leave
from tulle.comm.monitored_barrier import monitored_barrier
from tulle.mesh import Axis
from tulle.parts import Reduction


def number_of_all(number: Tensor, op: Reduction, axis: Axis, name: str) -> Tensor:
    """What all ranks' numbers make; a sum gives each rank's number its gradient. Every rank of the axis must call it.

    Ranks meet before they exchange anything: a user may well look at a weight on one rank alone, whose exchange the
    others would meet with another one.

    Args:
        number: This rank's.
        op: How they go together.
        axis: Whose ranks have parts.
        name: Of the tensor that they are parts of.

    Raises:
        CommunicationError: If a rank does not come within the axis' time-out; who waits is told after seconds.
    """
    _meet(f"one number of all of {name}", "ask for its sum, norm or largest", name, axis)
    label = f"numbers of {name}"
    return (
        leave(number, axis, label=label) if op == "sum" else all_reduce(number.clone(), axis, label=label, op=op).wait()
    )


def meet_to_read(name: str, axis: Axis) -> None:
    """Have ranks meet before they send their parts of a tensor. Every rank of the axis must call it, alike.

    Args:
        name: Of the tensor.
        axis: Whose ranks have parts.

    Raises:
        CommunicationError: If a rank does not come within the axis' time-out; who waits is told after seconds.
    """
    _meet(f"all of {name}", "read it", name, axis)


def _meet(what: str, ask: str, name: str, axis: Axis) -> None:
    mend = (
        f"each rank has a part of {name}, so every rank must {ask}: do so in front of `if rank == 0:`, or take its "
        ".to_local(), which is this rank's part"
    )
    monitored_barrier(axis, what, mend)
