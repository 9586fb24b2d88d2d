"""`Buffers`: in which forwards write in place, so that a micro-batch that waits may find what a later one has written.

Copies for each would cost memory and time. So who reads one of these after its backward is told.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from tulle.pipeline.attributes import own_attributes
from tulle.pipeline.placeholder import Placeholder

Written = list[dict[int, tuple[str, int]]]
"""Of modules with buffers: by identity the name of each in its module, and how often it was written in so far."""
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
        self._writing: list[tuple[str, nn.Module, bool]] = []
        """The modules among these in whose tensors a forward was seen to write."""
        self._before: Written = []

    def begin(self) -> None:
        """A forward begins."""
        self._before = [_versions(module, is_between) for _, module, is_between in self._all]

    def look(self) -> None:
        """A forward is over, or waits."""
        for one, before in zip(self._all, self._before, strict=True):
            if one not in self._writing and _changed(before, _versions(*one[1:])):
                self._writing.append(one)

    def now(self) -> Written:
        """How often tensors of these modules were written in."""
        return [_versions(module, is_between) for _, module, is_between in self._writing]

    def written_since(self, before: Written) -> dict[int, str]:
        """The names of tensors in which something was written since, by identity."""
        found: dict[int, str] = {}
        for (path, module, is_between), then in zip(self._writing, before, strict=False):
            now = _versions(module, is_between)
            changed = _changed(then, now)
            if any(name == _COUNTS for name in changed.values()):
                changed = {identity: name for identity, (name, _) in now.items()}
            found |= {identity: f"{path}.{name}" if path else name for identity, name in changed.items()}
        return found


def _versions(module: nn.Module, is_between: bool) -> dict[int, tuple[str, int]]:  # noqa: FBT001 - of a tuple
    tensors = {**module._buffers, **own_attributes(module)} if is_between else module._buffers
    owns = ((name, one.own if isinstance(one, Placeholder) else one) for name, one in tensors.items())
    return {id(one): (name, one._version) for name, one in owns if isinstance(one, Tensor) and not one.is_inference()}


def _changed(before: Mapping[int, tuple[str, int]], now: Mapping[int, tuple[str, int]]) -> dict[int, str]:
    """The names of tensors that are the same ones, and were written in."""
    return {identity: one[0] for identity, one in now.items() if before.get(identity, one) != one}
