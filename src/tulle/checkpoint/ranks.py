"""`Ranks`: those that save and load together: all of a distributed model's, or this process alone with a plain one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor, nn

from tulle.comm import gather_values, monitored_barrier, on_host, raise_together
from tulle.distribute.adopted import axes_of, is_distributed
from tulle.distribute.axes import SAVING
from tulle.distribute.held import Held
from tulle.engine import DataParallel, engine_of, living_engines
from tulle.errors import CommunicationError, TulleError
from tulle.memory import shard_of
from tulle.mesh import Axis
from tulle.spread import spread_of
from tulle.tables import split_of

T = TypeVar("T")


def distributed(module: nn.Module) -> nn.Module:
    """The distributed model of which ranks have parts of a module's parameters; the module itself if they have none.

    Of replicas alone every rank has a module whole, and each may save its own.
    """
    parts = (p for p in module.parameters() if any(told(p) is not None for told in (split_of, shard_of, spread_of)))
    if is_distributed(module) or (part := next(parts, None)) is None:
        return module
    engine = engine_of(part) or _engine_of_stages(part)
    return engine.model.whole if engine is not None and isinstance(engine.model, Held) else module


def _engine_of_stages(parameter: Tensor) -> DataParallel | None:
    """The engine of the model that has a parameter at whatever stage; those of other stages are tied to none here."""
    return next(
        (
            engine
            for engine in living_engines()
            if isinstance(engine.model, Held) and any(one is parameter for one in engine.model.whole.parameters())
        ),
        None,
    )


class Ranks:
    """The ranks of an axis, or this process alone.

    Args:
        axis: The axis, None if alone.
    """

    def __init__(self, axis: Axis | None) -> None:
        self._axis = axis
        self.rank, self.size = (axis.rank, axis.size) if axis else (0, 1)
        self.device = axis.device if axis else torch.device("cpu")

    @staticmethod
    def of(model: nn.Module) -> Ranks:
        """The ranks that have a model together: those of its mesh, or this process alone with a plain one.

        Args:
            model: As `distributed` gives it.
        """
        engine, axes = engine_of(model), axes_of(model)
        if axes is not None and axes.whole.size > axes.data.size:
            return Ranks(axes.whole)
        return Ranks(engine.axis if engine else None)

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that does what one must do."""
        return self.rank == 0

    @property
    def are_one(self) -> bool:
        """Whether this process saves, or loads, alone."""
        return self.size == 1

    def apart(self) -> Ranks:
        """The same on a process group of their own, for a thread beside training. All must call it."""
        return Ranks(on_host(self._axis, SAVING)) if self._axis else self

    def meet(self, what: str) -> None:
        """Wait until all are here, and say whom this one waits for. All must call it.

        Args:
            what: What they come to: `"tulle.save"`, say.
        """
        if self._axis is not None and self.size > 1:
            monitored_barrier(self._axis, what, "every rank must call it, not within `if rank == 0:`")

    def gather(self, value: T) -> list[T]:
        """Every rank's value. All must call it."""
        return gather_values(value, self._axis, label=SAVING) if self._axis else [value]

    @contextmanager
    def alike(self, unforeseen: Callable[[Exception], TulleError] | None = None) -> Iterator[None]:
        """Raise on every rank what the body raises on any: what the lowest failing one found. All must enter it.

        Args:
            unforeseen: Makes an error of ours of any other; None if none is to be expected.
        """
        error: TulleError | None = None
        try:
            yield
        except CommunicationError:
            raise  # the others know
        except TulleError as found:
            error = found
        except Exception as problem:  # whatever it is, the other ranks wait for word of it
            if unforeseen is None:
                raise
            error = unforeseen(problem)
            error.__cause__ = problem
        if self._axis is not None:
            raise_together(error, self._axis, label=SAVING)
        elif error is not None:
            raise error
