"""Hands what runs between modules to a program: every operation of torch of one thread, for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

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
        self._mode = torch._C._pop_torch_function_stack() if torch._C._len_torch_function_stack() else None
        if self._mode is not None and type(self._mode) is not Interception:
            torch._C._push_on_torch_function_stack(self._mode)
            self._mode = None

    def __exit__(self, *_: object) -> None:
        if self._mode is not None:
            torch._C._push_on_torch_function_stack(self._mode)
