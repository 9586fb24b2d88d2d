"""`Carried`: whether what a model computes between its placed modules is kept for later, in buffers or attributes.

Micro-batches pass one another wherever one waits, so the forward of one could read what another has left: a moving
average (that of batch norm too), an auxiliary loss that a module or a hook remembers, a counter, or a private generator
of random numbers. Of such a model each forward ends before the next begins.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tulle.generators import GENERATORS, standing
from tulle.pipeline.attributes import own_attributes
from tulle.pipeline.homes import outward
from tulle.pipeline.left_behind import LeftBehind
from tulle.pipeline.placeholder import Placeholder
from tulle.pipeline.plain import is_plain, state_of


class Carried:
    """What of a model outlives a forward, as far as code between modules can reach it.

    Args:
        model: That is placed.
        placed: Names of its placed modules.
    """

    def __init__(self, model: nn.Module, placed: Collection[str]) -> None:
        units = set(placed)
        between = {name: module for name, module in model.named_modules() if units.isdisjoint(outward(name))}
        self._between = list(between.values())
        within = {name: one for name, one in model.named_modules() if name not in between and one._buffers}
        self._buffered = [*between.items(), *within.items()]
        self._placed = [model.get_submodule(name) for name in placed]
        self.left = LeftBehind(between, {name: model.get_submodule(name) for name in placed})
        self._tensors = [*model.parameters(), *model.buffers()]
        self._versions: list[int] = []
        self._attributes: list[object] = []
        self._is_left = False
        """Whether a forward was seen to have left something, in the step at hand."""
        self.is_idle = False
        """Whether the last step called the model not at all, though it could have."""
        self._is_seen: bool | None = None

    @property
    def is_likely(self) -> bool:
        """Whether something is, or no step has shown yet that nothing is."""
        return bool(self._is_seen) or (self._is_seen is None and not self.is_idle)

    def replaced(self) -> list[tuple[str, dict[str, Any], str, Placeholder]]:
        """Buffers in whose places code between modules has put what it computed: their names, and where that hangs.

        They may be those of placed modules, too.
        """
        return [
            (f"{name}.{key}" if name else key, module._buffers, key, value)
            for name, module in self._buffered
            for key, value in module._buffers.items()
            if isinstance(value, Placeholder)
        ]

    def begin(self) -> None:
        """A step begins."""
        self._versions = _written(self._tensors)
        self._attributes, self._is_left = self._now(), False

    def look(self) -> None:
        """A forward is over, or waits: until it is known, see whether it left something, which it could put back."""
        if self._is_seen is None and not self._is_left and self._attributes != self._now():
            self._is_left = True

    def end(self, *, is_kept: bool) -> None:
        """A step is over; what it was seen to keep is kept from now on.

        Args:
            is_kept: Whether somebody still has a value that a program made.
        """
        is_written = self._versions != _written(self._tensors)
        is_remembered = is_kept or self._is_left or self._attributes != self._now()
        self._is_seen = bool(self._is_seen) or is_written or is_remembered
        self._attributes, self._is_left, self.is_idle = [], False, False

    def _now(self) -> list[object]:
        """What hangs on modules; of placed ones numbers only, since code within them is free to keep the rest."""
        found: list[object] = [
            value
            for module in self._placed
            for value in vars(module).values()
            if isinstance(value, int | float | complex)
        ]
        seen = set[int]()
        for module in self._between:
            found += (_state_of(value, seen) for value in (module._buffers, *own_attributes(module).values()))
        return found


class _Same:
    """Equal to what stands for the same object only."""

    __slots__ = ("_it",)

    def __init__(self, it: object) -> None:
        self._it = it

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other._it is self._it

    __hash__ = None  # type: ignore[assignment]


def state_within(value: Any) -> object:
    """What differs if something in a value has changed."""
    return _state_of(value, set())


def _state_of(value: Any, seen: set[int]) -> object:
    """What differs if an attribute has been set, or what is in it has changed, as far as that can be seen."""
    if isinstance(value, int | float | complex | str | bytes | type(None)):
        return value
    if id(value) in seen:
        return _Same(value)
    seen.add(id(value))
    if type(value) is Tensor:
        return [_Same(value), *_written([value])]
    if isinstance(value, list | tuple | set | deque):
        return [type(value), *(_state_of(one, seen) for one in value)]
    if isinstance(value, Mapping):
        return [type(value), *value, *(_state_of(one, seen) for one in value.values())]
    if is_plain(value):
        state = state_of(value)
        return [_Same(value), *state, *(_state_of(one, seen) for one in state.values())]
    if isinstance(value, GENERATORS):
        return standing(value)
    return object() if hasattr(value, "__next__") else _Same(value)  # who knows where an iterator stands


def _written(tensors: Sequence[Tensor]) -> list[int]:
    """How often each was written in so far."""
    with torch._C.DisableTorchFunctionSubclass():  # of parts, and of what lives elsewhere
        return [tensor._version for tensor in tensors if not tensor.is_inference()]
