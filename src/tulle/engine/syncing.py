"""`Syncing`: whether the gradients of a model's replicas travel, or add up on each rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tulle.engine.ends import NOT_RUNNING


class Syncing:
    """Whether gradients travel: as under DDP, those of a forward that ran while they did, wherever its backward is."""

    def __init__(self) -> None:
        self._is_on, self._is_awaited = True, False

    def __bool__(self) -> bool:
        return self._is_on or self._is_awaited

    @property
    def is_on(self) -> bool:
        """Whether those of a forward that begins now are to travel."""
        return self._is_on

    def begin_forward(self) -> None:
        """Note how the last forward of the whole model began, of those that a backward does not run again."""
        if torch._C._current_graph_task_id() == NOT_RUNNING:
            self._is_awaited = self._is_on

    def end_backward(self) -> bool:
        """Whether the gradients of the backward that ends here travel."""
        travelled, self._is_awaited = bool(self), False
        return travelled

    @contextmanager
    def off(self) -> Iterator[None]:
        """Let gradients of what runs forward within this context add up; the first backward after it sends the sums."""
        before, self._is_on = self._is_on, False
        try:
            yield
        finally:
            self._is_on = before

    @contextmanager
    def off_for_all(self) -> Iterator[None]:
        """Let all gradients add up within this context, whenever their forward ran."""
        before, self._is_awaited = self._is_awaited, False
        try:
            with self.off():
                yield
        finally:
            self._is_awaited = before
