"""`monitored_barrier`: ranks wait for one another before they exchange something, and soon learn who will not come.

As `torch.distributed.monitored_barrier`, but over the run's key-value store (`tulle.board`): a rank that comes alone
has begun no exchange that the others would meet with another one, and it need not wait for the time-out to learn that
they have gone on, left or failed.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from weakref import WeakKeyDictionary, WeakSet

import torch.distributed as dist

from tulle.board import arrive, begun, first_failure, has_left, have_come, take_back
from tulle.comm.agree import gather_values
from tulle.comm.traffic import now_s, traffic
from tulle.errors import CommunicationError
from tulle.mesh import Axis

logger = logging.getLogger("tulle")
_LOOKING_S = 0.2
"""Each time after so many seconds it is looked what the others do."""
_LONG_S = 3.0
"""After so many it is told who is waited for."""
_passed: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()
"""How many this process has passed, by group: several meshes have that of all processes."""
_followed: WeakSet[dist.ProcessGroup] = WeakSet()
"""Groups whose ranks count their steps from one number on."""


def monitored_barrier(axis: Axis, what: str, mend: str) -> None:
    """Wait until all ranks of an axis are here. Every rank of it must call it, alike.

    Args:
        axis: Whose ranks are to come.
        what: What they come to: `"optimizer.state_dict()"`, say.
        mend: What to do where some do not come, as the end of a sentence.

    Raises:
        CommunicationError: If a rank has begun another step (after `follow_steps`), has left, or failed, or does
            not come within the axis' time-out.
    """
    passed = _passed.get(axis.group, 0)
    keys = [f"{axis.group.group_name}/{passed}/{rank}" for rank in range(axis.size)]
    begin_s, is_told = now_s(), False
    arrive(keys[axis.rank])
    while not have_come(keys, patience_s=_LOOKING_S):
        missing = [rank for rank, key in enumerate(keys) if not have_come([key])]
        waited_s = now_s() - begin_s
        word = _why_not(axis, missing)
        if word is None and waited_s > axis.timeout_s:
            word = f"{_named(missing)} did not come in {axis.timeout_s:g} s"
        if missing and word is not None:
            take_back(keys[axis.rank])
            raise CommunicationError(f"{what} was called on rank {axis.rank} of axis {axis.name!r}, but {word}: {mend}")
        if missing and waited_s > _LONG_S and not is_told:
            logger.warning("%s on rank %d waits for %s: %s", what, axis.rank, _named(missing), mend)
            is_told = True
    traffic.waited(now_s() - begin_s)
    _passed[axis.group] = passed + 1
    if passed:  # all are here, so that nobody looks for the last time any more
        take_back(f"{axis.group.group_name}/{passed - 1}/{axis.rank}")


def follow_steps(axis: Axis) -> None:
    """Have `monitored_barrier` on an axis notice ranks that have begun another step. Every rank of it must call it.

    It costs microseconds a step.
    """
    traffic.begun = max(gather_values(traffic.begun, axis, label="steps"))  # what came before need not be alike
    traffic.is_followed = True
    _followed.add(axis.group)


def _why_not(axis: Axis, missing: Sequence[int]) -> str | None:
    """Why some ranks will not come, if it is known."""
    for rank in missing:
        if axis.group in _followed and begun(axis.ranks[rank]) > traffic.begun:
            return f"rank {rank} has begun another step"
        if has_left(axis.ranks[rank]):
            return f"rank {rank} has left"
    return first_failure(patience_s=0.0)


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
