"""`Buffers`: finds which of a model's buffers a step has written, so that constant ones need not travel.

DDP sends all buffers before every forward, masks and position tables too; many users turn that off, and lose the
statistics of batch norm with it.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase


class Buffers:
    """The buffers of one model, by name, and what they were after the last synchronization."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._names = [name for name, _ in model.named_buffers()]
        self._settled = self._versions()

    def __len__(self) -> int:
        return len(self._names)

    def current(self) -> list[Tensor]:
        """The buffers, in the order of `moved`; a step may have put new tensors in their places."""
        buffers = dict(self._model.named_buffers())
        return [buffers[name] for name in self._names]

    def moved(self) -> list[bool]:
        """Which buffers were written or replaced since `settle`.

        A tensor's version counter tells, but for the kernels of batch and instance norm, which write running
        statistics past it; so the buffers of a module move together, and those of a norm in training always do.
        """
        now = self._versions()
        modules = {name.rpartition(".")[0] for name in self._names if now[name] != self._settled[name]}
        modules |= {
            name
            for name, module in self._model.named_modules()
            if isinstance(module, _NormBase) and module.training and module.track_running_stats
        }
        return [name.rpartition(".")[0] in modules for name in self._names]

    def settle(self) -> None:
        """Take what the buffers are now as unwritten."""
        self._settled = self._versions()

    def _versions(self) -> dict[str, tuple[int, int]]:
        return {name: (id(buffer), buffer._version) for name, buffer in self._model.named_buffers()}
