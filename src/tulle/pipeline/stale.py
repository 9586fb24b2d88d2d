"""`Buffers`: in which forwards write in place, so that a micro-batch that waits may find what a later one has written.

Copies for each would cost memory and time. So who reads one of these after its backward is told.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from tulle.pipeline.attributes import own_attributes
from tulle.pipeline.placeholder import Placeholder

_COUNTS = "num_batches_tracked"
"""Tells of writes in the buffers beside it, which batch norm makes past the count of writes."""


class Buffers:
    """Those of one model, and tensors that hang as attributes on modules between those that are placed.

    Args:
        between: Modules that are not placed, nor within such, by name.
        placed: Those that are, by name.
    """

    def __init__(self, between: Mapping[str, nn.Module], placed: Mapping[str, nn.Module]) -> None:
        within = {path: one for unit, module in placed.items() for path, one in module.named_modules(prefix=unit)}
        self._all = [(path, one, True) for path, one in between.items()]
        self._all += [(path, one, False) for path, one in within.items() if one._buffers]
        self._before: list[list[int]] = []
        self._writing = set[str]()
        """Names of modules in whose tensors a forward was seen to write."""
        self._watched: list[Tensor] = []
        self._names: dict[int, tuple[str, int]] = {}
        """The name of each tensor of these, by identity, and the place of what tells of writes in it."""

    def begin(self) -> None:
        """The first forward of a step begins."""
        self._before = [[one._version for one in _tensors(module, own).values()] for _, module, own in self._all]

    def look(self) -> None:
        """It is over."""
        self._watched, self._names = [], {}
        for (path, module, is_between), before in zip(self._all, self._before, strict=True):
            tensors = _tensors(module, is_between)
            if path in self._writing or before != [one._version for one in tensors.values()]:
                self._writing.add(path)
                for name, one in tensors.items():
                    self._names[id(one)] = (f"{path}.{name}" if path else name), len(self._watched)
                    if _COUNTS not in tensors:
                        self._watched.append(one)
                if _COUNTS in tensors:
                    self._watched.append(tensors[_COUNTS])

    def end(self) -> None:
        """The step is over."""
        self._before, self._watched, self._names = [], [], {}

    def now(self) -> list[int]:
        """How often such tensors were written in."""
        return [one._version for one in self._watched]

    def written_since(self, tensor: Any, before: Sequence[int]) -> str | None:
        """The name of a tensor, if it is one of these and something was written in it since."""
        name, place = self._names.get(id(tensor), ("", 0))
        return name if name and self._watched[place]._version != before[place] else None


def _tensors(module: nn.Module, is_between: bool) -> dict[str, Tensor]:  # noqa: FBT001 - of a tuple
    tensors = {**module._buffers, **own_attributes(module)} if is_between else module._buffers
    owns = {name: one.own if isinstance(one, Placeholder) else one for name, one in tensors.items()}
    return {name: one for name, one in owns.items() if isinstance(one, Tensor) and not one.is_inference()}
