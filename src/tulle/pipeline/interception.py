"""Hands what runs between modules to a program: every operation of torch of one thread, for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.overrides import TorchFunctionMode, _get_current_function_mode, _pop_mode, _push_mode

from tulle.pipeline.placeholder import Operator, intercept, running
from tulle.pipeline.recompute import intercept_functions


class Interception(TorchFunctionMode):
    """Hands every operation of torch between modules to a program."""

    def __init__(self, program: Operator) -> None:
        super().__init__()
        self._program = program

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run it where it belongs."""
        return intercept(func, args, kwargs or {}, self._program)


@contextmanager
def run_in_this_thread(program: Operator) -> Iterator[None]:
    """Hand what this thread does within this context to a program."""
    intercept_functions()
    token = running.set(program)
    try:
        with Interception(program):
            yield
    finally:
        running.reset(token)


class interception_aside:  # noqa: N801 - used like a function; a class costs half as much as a generator
    """Have operations that are not the user's, or a unit's own, run as in one process."""

    __slots__ = ("_mode",)

    def __enter__(self) -> None:
        mode = _get_current_function_mode()
        self._mode = mode if isinstance(mode, Interception) else None
        if self._mode is not None:
            _pop_mode()

    def __exit__(self, *_: object) -> None:
        if self._mode is not None:
            _push_mode(self._mode)
