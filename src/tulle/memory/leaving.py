"""`Leaving`: gradients on their way to the ranks that keep the parts; those of small units wait for each other.

    backward     u4          u3          u2          u1
    on the wire                          u4, u3          u2, u1

A message of a few numbers takes about as long as one of many. What waits has been sent when somebody asks for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from weakref import ref

import torch
from torch import Tensor

from tulle.memory.execution_order import ExecutionOrder, Sent
from tulle.memory.unit import Unit, joined

TOGETHER = 1 << 18
"""So many numbers at most go in one message of several units, 1 MiB in single precision."""


class Reduced:
    """Of the means of all ranks' gradients of one unit this rank's parts, when they are there.

    Args:
        leaving: Sends them.
    """

    def __init__(self, leaving: Leaving) -> None:
        self._leaving = leaving
        self._sent: Sent[list[Tensor | None]] | None = None
        self._place = slice(0)

    def send(self, sent: Sent[list[Tensor | None]], place: slice) -> None:
        """They have left, among others."""
        self._sent, self._place = sent, place

    def result(self) -> list[Tensor | None]:
        """Wait for them; None for what no rank has used.

        Raises:
            ModelError: If other ranks are at another exchange.
            CommunicationError: If a rank is gone, or does not come.
        """
        if self._sent is None:
            self._leaving.send()
        assert self._sent is not None, "everything that waited was sent"
        return self._sent.result()[self._place]


class Leaving:
    """The gradients of the units of one model that are on their way, and those that wait for others.

    Args:
        order: Of the exchanges of their axis.
    """

    def __init__(self, order: ExecutionOrder) -> None:
        self._order = order
        self._waiting: list[tuple[Unit, Sequence[Tensor | None], Sequence[Tensor], int, Reduced]] = []
        self._count = 0
        """Of numbers that wait."""
        self._backward = -1
        """Of what waits."""
        self._last: ref[Sent[list[Tensor | None]]] | None = None

    def add(self, unit: Unit, gradients: Sequence[Tensor | None], parts: Sequence[Tensor], *, number: int) -> Reduced:
        """Have gradients leave, at once or with what comes next. Every rank must call it, in the same order.

        Args:
            unit: Whose they are.
            gradients: Of its wholes.
            parts: Of its parameters, this rank's.
            number: For which time since the last step of an optimizer.
        """
        backward = torch._C._current_graph_task_id()
        if self._waiting and (backward != self._backward or self._count + unit.count > TOGETHER):
            self.send()
        reduced = Reduced(self)
        self._waiting.append((unit, gradients, parts, number, reduced))
        self._backward = backward
        self._count += unit.count
        if self._count >= TOGETHER:
            self.send()
        return reduced

    def send(self) -> None:
        """Have what waits leave, when what left before is there."""
        last = None if self._last is None else self._last()
        if last is not None:
            last.result()
        units, gradients, parts, numbers, waiting = zip(*self._waiting, strict=True)
        self._waiting, self._count = [], 0
        whole = joined(units)
        of_all = [gradient for of_unit in gradients for gradient in of_unit]
        own = [part for of_unit in parts for part in of_unit]
        exchange = f"gradients of {whole.name!r}{_frozen(whole, own)}{for_time(numbers[0])}"
        sent = self._order.submit(exchange, ("gradients", numbers[0]), partial(whole.reduce, of_all, own))
        self._last = ref(sent)
        begin = 0
        for reduced, of_unit in zip(waiting, parts, strict=True):
            reduced.send(sent, slice(begin, begin := begin + len(of_unit)))


def for_time(number: int) -> str:
    """What an exchange is called besides, so that ranks with unlike numbers of micro-batches do not take it for one."""
    return f", time {number + 1} since the last step" if number else ""


def _frozen(unit: Unit, parts: Sequence[Tensor]) -> str:
    """What of a unit has no gradients, so that ranks which freeze other parameters are told which."""
    with torch._C.DisableTorchFunctionSubclass():
        frozen = {number for number, part in enumerate(parts) if not part.requires_grad}
    if not frozen:
        return ""
    named = dict.fromkeys(f"{path}.{name}".lstrip(".") for path, name, number in unit.places if number in frozen)
    return f" without {', '.join(named)}, which is frozen"
