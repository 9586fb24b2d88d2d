"""`ExecutionOrder`: the order of all models' exchanges on one axis; it names ranks that are at another exchange.

What came after an exchange the last time is expected to come again, by all ranks alike, and goes at once. Any other is
announced before it goes. So ranks that take other branches do not meet in exchanges of other sizes, at which gloo ends
the process, nor in any: one of them announces, and the other does not hear it. Who waits for long tells the store where
it was lately, and looks there for the others. What such ranks have begun never ends, and all that comes later would
wait behind it, of other models too: from then on each rank is told so at once.

On GPUs a host runs ahead of what its GPU waits for, and nccl, which is given another size, reads past the memory. There
announcements go from host to host, before anything is begun.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Hashable
from functools import partial
from typing import Generic, TypeVar

import torch

from tulle.board import forget_place, places
from tulle.comm import BackgroundThread, Job, gather_values, on_host
from tulle.errors import CommunicationError, ModelError
from tulle.mesh import Axis

T = TypeVar("T")
LONG_S = 3.0
"""After so many seconds of waiting ranks look where the others are."""
_REMEMBERED = 1000
"""So many exchanges are told then: a host may have begun those of a whole forward when its GPU waits for the first."""


class ExecutionOrder:
    """The exchanges of one axis, which all its ranks must have in the same order.

    Args:
        axis: On a process group that nothing else uses. Every rank of it must make one.
    """

    def __init__(self, axis: Axis) -> None:
        self.axis = axis
        self._background = BackgroundThread("tulle shared out", axis.device)
        self._hosts = on_host(axis, "announcements") if self._background.takes_turns else axis
        self._announcing = BackgroundThread("tulle announces", torch.device("cpu"))
        self._followed: dict[tuple[str, Hashable], tuple[str, Hashable]] = {}
        """What came after an exchange the last time."""
        self._last: tuple[str, Hashable] = "", None
        self._lately = deque[str](maxlen=_REMEMBERED)
        self._exchanges = 0
        self._is_asking = False
        self._ended_by: Exception | None = None

    def submit(self, exchange: str, which: Hashable, do: Callable[[], T]) -> Sent[T]:
        """Have an exchange done in its turn. Every rank of the axis must call it, in the same order.

        Args:
            exchange: What it is, in words.
            which: Of several such in a step; not the same one is followed by the same.
            do: Does it.

        Raises:
            CommunicationError: If one has failed before, which ended all of this axis.
        """
        if self._ended_by is not None:
            raise CommunicationError(
                f"{exchange} cannot be exchanged any more on axis {self.axis.name!r}, on which full_shard has failed "
                f"before, and ranks are out of step since, for other models too: {self._ended_by}. Have all "
                "ranks end where one catches an error; or have all make a new mesh by tulle.init, distribute a new "
                "model on it, and start anew from a checkpoint"
            ) from self._ended_by
        is_expected = self._followed.get(self._last) == (exchange, which)
        self._followed[self._last] = self._last = exchange, which
        self._exchanges += 1
        self._lately.append(exchange)
        if not is_expected and self._background.takes_turns:
            Sent(self._announcing.submit(partial(_announce, exchange, self._hosts)), exchange, self).result()
        elif not is_expected:
            do = partial(_announced, exchange, self.axis, do)
        return Sent(self._background.submit(do, meanwhile=self.ask, after_s=LONG_S), exchange, self)

    def ask(self) -> None:
        """Leave word of the latest exchanges, and look at those of the other ranks.

        Raises:
            ModelError: If one of them was another on another rank.
        """
        self._is_asking = True
        mine = {self._exchanges - back: exchange for back, exchange in enumerate(reversed(self._lately))}
        for rank, told in places(self._key, self.axis.rank, json.dumps(mine), self.axis.size).items():
            theirs = {int(number): exchange for number, exchange in json.loads(told).items()}
            for number in sorted(mine.keys() & theirs.keys()):
                try:
                    _check(mine[number], theirs[number], rank, self.axis)
                except ModelError as error:
                    self.end(error)  # which waits in vain from now on
                    raise

    def go_on(self) -> None:
        """Take back that this rank waits, if it has said so."""
        if self._is_asking:
            forget_place(self._key, self.axis.rank)
            self._is_asking = False

    @property
    def _key(self) -> str:
        return self.axis.group.group_name

    def end(self, error: Exception) -> None:
        """No exchange of this axis can be had any more, by what this rank has just been told."""
        self._ended_by = self._ended_by or error


class Sent(Generic[T]):
    """An exchange that was submitted.

    Args:
        job: Does it.
        exchange: What it is.
        order: It is one of.
    """

    def __init__(self, job: Job[T], exchange: str, order: ExecutionOrder) -> None:
        self._job, self._exchange, self._order = job, exchange, order

    def result(self) -> T:
        """Wait for it, and give what it gave.

        Raises:
            ModelError: If other ranks are at another exchange.
            CommunicationError: If a rank is gone, or does not come, naming the exchange.
        """
        try:
            result = self._job.result(meanwhile=self._order.ask, after_s=LONG_S)
        except CommunicationError as error:
            told = CommunicationError(f"while this rank was at {self._exchange}: {error}")
            self._order.end(told)
            raise told from error
        self._order.go_on()
        return result


def other_branch(said: str) -> ModelError:
    """What to raise where ranks are at different modules."""
    return ModelError(
        f"full_shard gathers the parameters of a module from all ranks, but these are at different ones: {said}. Have "
        "all ranks call the same modules in the same order, as often a step (as many micro-batches each), also where "
        "data or the rank decide (experts, early exits; model.state_dict(), of which one rank may save what all have "
        "made), and freeze the same parameters, or leave full_shard out of the plan"
    )


def _announced(exchange: str, axis: Axis, do: Callable[[], T]) -> T:
    """Tell the others what comes, and do it if all say the same. Every rank of the axis must call it.

    Raises:
        ModelError: On every rank, if they do not.
    """
    _announce(exchange, axis)
    return do()


def _announce(exchange: str, axis: Axis) -> None:
    for rank, theirs in enumerate(gather_values(exchange, axis, label="what comes next")):
        _check(exchange, theirs, rank, axis)


def _check(exchange: str, theirs: str, rank: int, axis: Axis) -> None:
    if theirs != exchange:
        raise other_branch(f"{theirs} on rank {rank}, {exchange} on rank {axis.rank}")
