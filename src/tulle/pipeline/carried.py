"""`Carried`: whether what a model computes between its placed modules is kept for later, in buffers or attributes.

Micro-batches pass one another wherever one waits, so the forward of one could read what another has left: a moving
average, an auxiliary loss that a module remembers. Of such a model each forward ends before the next begins.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from torch import nn

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
        self._versions: list[int] = []
        self._is_seen: bool | None = None

    @property
    def is_likely(self) -> bool:
        """Whether something is, or no step has shown yet that nothing is."""
        return self._is_seen is not False

    def begin(self) -> None:
        """A step begins."""
        self._versions = self._written()

    def end(self) -> None:
        """A step is over; what it was seen to keep is kept from now on."""
        is_written = self._versions != self._written()
        is_remembered = any(isinstance(value, Placeholder) for value in self._remembered())
        self._is_seen = bool(self._is_seen) or is_written or is_remembered

    def _written(self) -> list[int]:
        return [tensor._version for tensor in self._tensors if not tensor.is_inference()]

    def _remembered(self) -> Iterator[object]:
        for module in self._modules:
            for value in (*vars(module).values(), *module._buffers.values()):
                yield from value if isinstance(value, list | tuple) else (value,)
