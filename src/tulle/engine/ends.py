"""`end_with`: engines that have had a gradient in a backward end with it, together."""

from __future__ import annotations

from functools import partial
from typing import Protocol
from weakref import WeakSet, WeakValueDictionary

from torch.autograd import Variable

from tulle.comm import untraced
from tulle.errors import GradientError, ModelError

NOT_RUNNING = -1
"""The number of the backward that is running, if none is."""


class Ending(Protocol):
    """What is to be told that a backward has ended: an engine."""

    number: int

    def end_backward(self) -> None:
        """Do what is left to be done with the gradients. It is called on every rank."""
        ...


_joined: WeakValueDictionary[int, WeakSet[Ending]] = WeakValueDictionary()
"""Engines whose parameters have had a gradient, by the backward that is running; one that fails does not call back."""


def end_with(backward: int, engine: Ending) -> None:
    """Have an engine end with this backward.

    All that take part end together, in the order of their numbers, because each rank's graph calls back in its own.
    """
    engines = _joined.get(backward)
    if engines is None:
        engines = _joined[backward] = WeakSet[Ending]()
        Variable._execution_engine.queue_callback(partial(_end, engines))
    engines.add(engine)


def is_under_way(backward: int) -> bool:
    """Whether engines are to end with this backward: it has neither ended nor failed, as around one within it."""
    return backward in _joined


@untraced  # a function that is compiled may have the backward in it
def _end(engines: WeakSet[Ending]) -> None:
    """Raises after all have ended: of what is wrong with one model the others are to hear nothing."""
    found: GradientError | ModelError | None = None
    for engine in sorted(engines, key=lambda engine: engine.number):
        try:
            engine.end_backward()
        except (GradientError, ModelError) as error:
            found = found or error
    if found is not None:
        raise found
