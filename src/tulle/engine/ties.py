"""`Tie`: how a parameter knows the engine that keeps it in step."""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar
from weakref import ref

from tulle.mesh import Axis


class Engine(Protocol):
    """What keeps parameters in step."""

    home: Axis


E = TypeVar("E", bound=Engine)


class Tie(Generic[E]):
    """How a parameter knows its engine, without holding it.

    A graph holds parameters where no garbage collector sees it. A module may keep one, with its last output say; if the
    parameter held the engine, which holds the model, none of them would ever be gone.
    """

    __slots__ = ("_engine", "_is_shared")

    def __init__(self, engine: E) -> None:
        self._engine, self._is_shared = ref(engine), engine.home.size > 1

    def __call__(self) -> E | None:
        """The engine, if it is there."""
        return self._engine()

    @property
    def is_cut(self) -> bool:
        """Whether the engine is gone, and other ranks have such a parameter."""
        return self._is_shared and self._engine() is None

    def __reduce_ex__(self, protocol: object) -> tuple[object, ...]:
        """A copied or pickled parameter knows of no engine."""
        return type(None), ()
