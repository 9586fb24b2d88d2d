"""`Pending`: a collective under way; waiting for it counts the time and says who fell if it fails."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from tulle.board import absent, come, departed, doing, first_failure
from tulle.comm.traffic import now_s, traffic
from tulle.errors import CommunicationError
from tulle.mesh import Axis
from tulle.process_groups import GONE, is_gone
from tulle.shared_memory import Work

T = TypeVar("T", covariant=True)
Label = str | Mapping[str, int]
"""What an exchange is for: a name, or the share in bytes of each of several tables that travel together."""
Arrived = Callable[[int, Tensor], None]
"""Called with a rank and its part as soon as that is there, while others may still be under way."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """What is being sent, for counters, timeline and error texts."""

    operation: str
    axis: Axis
    label: Label
    bytes_sent: int
    messages: int

    @property
    def name(self) -> str:
        """The label as one text."""
        return self.label if isinstance(self.label, str) else ", ".join(self.label)


class Deferred(Generic[T]):
    """Something whose last part is done at `wait()`, once; later waits give the same result."""

    __slots__ = ("_finish", "_result")

    def __init__(self, finish: Callable[[], T]) -> None:
        self._finish: Callable[[], T] | None = finish

    def wait(self) -> T:
        """Finish, and give the result."""
        if self._finish is not None:
            self._result = self._finish()
            self._finish = None  # what it holds (buffers, works) can go
        return self._result


class Pending(Deferred[T]):
    """A collective under way; `wait()` gives its result.

    On CUDA, `wait` makes the current stream wait, not the host, as `torch.distributed` does.

    Raises:
        CommunicationError: From `wait`, if a rank has gone or the axis' timeout has passed.
    """

    __slots__ = ("_exchange", "_works")

    def __init__(self, exchange: Exchange, works: Sequence[dist.Work | Work], finish: Callable[[], T]) -> None:
        super().__init__(finish)
        self._exchange = exchange
        self._works = list(works)
        traffic.sent(exchange.label, exchange.bytes_sent, exchange.messages)
        if traffic.is_tracing:
            trace(self._works, exchange, now_s())

    def wait(self) -> T:
        """Wait for the end, and give the result."""
        if self._finish is None:
            return self._result
        begin_s = now_s()
        with translated(self._exchange):
            for work in self._works:
                work.wait()
            result = super().wait()
        self._works.clear()
        traffic.waited(now_s() - begin_s)
        traffic.span("waiting", f"wait: {self._exchange.name}", begin_s, now_s())
        return result


@contextmanager
def translated(exchange: Exchange):
    """Turn what the backend raises into a `CommunicationError` that names table, step and the rank that fell first.

    A GPU's memory may end while what came is put together: loops catch that, and take a smaller batch.
    """
    try:
        yield
    except (CommunicationError, torch.OutOfMemoryError):
        raise
    except ValueError as error:
        if not is_gone(exchange.axis.group):
            raise
        raise CommunicationError(f"{exchange.operation} of {exchange.name} cannot begin: {GONE}") from error
    except RuntimeError as error:
        axis = exchange.axis
        cause = first_failure() or departed(axis.ranks) or _who_is_late(exchange)
        raise CommunicationError(
            f"{exchange.operation} of {exchange.name} in step {traffic.step} failed on rank {axis.rank} of axis "
            f"{axis.name!r} ({axis.size} ranks, timeout {axis.timeout_s:g} s): {cause}. "
            f"The backend said: {str(error).partition(chr(10))[0]}"
        ) from error


def _who_is_late(exchange: Exchange) -> str:
    """Nobody failed: then some rank did not come here. Those who did say so, which leaves the others."""
    key = f"{traffic.step}/{exchange.operation}/{exchange.name}"
    come(key, exchange.axis.rank)
    late = absent(key, range(exchange.axis.size))
    if not late or len(late) == exchange.axis.size:
        return "no rank has said why: see the log of each rank"
    text = f"rank{'s' if len(late) > 1 else ''} {', '.join(map(str, late))} did not come to it"
    told = [f"rank {rank} {word}" for rank in late if (word := doing(exchange.axis.ranks[rank]))]
    return f"{text}: {', '.join(told) or 'see the log there'}"


def hand_over(
    arrived: Arrived | None, sources: Iterable[int], lengths: Sequence[int], receives: Sequence[Tensor]
) -> None:
    """Call what is to be done with the parts that have come from some ranks; it is no waiting."""
    if arrived is None:
        return
    begin_s = now_s()
    for source in sources:
        if lengths[source]:
            arrived(source, receives[source])
    traffic.waited(begin_s - now_s())


def done(exchange: Exchange, result: T) -> Pending[T]:
    """An exchange that has nothing to send, as on an axis of one rank."""
    return Pending(exchange, (), lambda: result)


def trace(works: Sequence[dist.Work | Work], exchange: Exchange, begin_s: float) -> None:
    """Have the timeline show an exchange from its begin to the end of its last work, where that tells."""

    def ended(_: object) -> None:
        traffic.span(exchange.operation, exchange.name, begin_s, now_s(), exchange.bytes_sent)

    if works:
        with suppress(RuntimeError):  # gloo's sends and receives have no future: the wait alone is drawn
            works[-1].get_future().then(ended)
