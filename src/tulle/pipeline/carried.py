"""`Carried`: whether what a model computes between its placed modules is kept for later, in buffers or attributes.

Micro-batches pass one another wherever one waits, so the forward of one could read what another has left: a moving
average, an auxiliary loss that a module remembers, or the buffers of a placed module that is called more than once.
Of such a model each forward ends before the next begins.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from types import UnionType

from torch import Tensor, nn

from tulle.pipeline.placeholder import Placeholder


class Carried:
    """What of a model outlives a forward, as far as code between modules can reach it.

    Args:
        model: That is placed.
        placed: Names of its placed modules.
    """

    def __init__(self, model: nn.Module, placed: Collection[str]) -> None:
        def is_within(name: str) -> bool:
            return any(name.startswith(f"{other}." if other else "") and name != other for other in placed)

        self._modules = [module for name, module in model.named_modules() if not is_within(name)]
        between = (module for name, module in model.named_modules() if not is_within(name) and name not in placed)
        buffers = [buffer for module in between for buffer in module.buffers(recurse=False)]
        self._tensors = [*model.parameters(), *buffers]
        self._buffers = {name: list(model.get_submodule(name).buffers()) for name in placed}
        self._versions: list[int] = []
        self._versions_within: dict[str, list[int]] = {}
        self._numbers: list[object] = []
        self._is_seen: bool | None = None

    @property
    def is_likely(self) -> bool:
        """Whether something is, or no step has shown yet that nothing is."""
        return self._is_seen is not False

    def begin(self) -> None:
        """A step begins."""
        self._versions = _written(self._tensors)
        self._versions_within = {name: _written(buffers) for name, buffers in self._buffers.items()}
        self._numbers = self._attributes(int | float | complex)

    def end(self, most_calls: Callable[[str], int]) -> None:
        """A step is over; what it was seen to keep is kept from now on.

        Args:
            most_calls: How often a program called a placed module at most: between two calls, others could write.
        """
        is_written = self._versions != _written(self._tensors)
        is_written_within = any(
            versions != _written(self._buffers[name]) and most_calls(name) > 1
            for name, versions in self._versions_within.items()
        )
        is_remembered = bool(self._attributes(Placeholder)) or self._numbers != self._attributes(int | float | complex)
        self._is_seen = bool(self._is_seen) or is_written or is_written_within or is_remembered

    def _attributes(self, kinds: type | UnionType) -> list[object]:
        """Values of such types that hang on modules, also in lists and tuples."""
        found: list[object] = []
        for module in self._modules:
            for value in (*vars(module).values(), *module._buffers.values()):
                several = value if isinstance(value, list | tuple) else (value,)
                found += [one for one in several if isinstance(one, kinds)]
        return found


def _written(tensors: Sequence[Tensor]) -> list[int]:
    """How often each was written in so far."""
    return [tensor._version for tensor in tensors if not tensor.is_inference()]
