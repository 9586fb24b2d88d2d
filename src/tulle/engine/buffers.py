"""`Buffers`: finds which of a model's buffers a step has written, and gives all ranks those of rank 0.

DDP sends all buffers before every forward, masks and position tables too; many users turn that off, and lose the
statistics of batch norm with it. Here a buffer travels when its values differ from what they were: a comparison with
a copy costs a pass over memory, and sees what version counters miss (batch norm's kernels, writes through `.data`).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from tulle.comm import gather_values
from tulle.engine.replicas import broadcast_tensors, memory_of
from tulle.mesh import Axis

_LABEL = "buffers"
logger = logging.getLogger("tulle")


class Buffers:
    """The buffers of one model, and what they were after the last synchronization.

    Args:
        model: Whose buffers.
        axis: Whose ranks hold replicas.
    """

    def __init__(self, model: nn.Module, axis: Axis) -> None:
        self._model = model
        self._axis = axis
        followed = model.named_buffers() if axis.size > 1 else ()
        self._settled: dict[str, Tensor | None] = {name: buffer.detach().clone() for name, buffer in followed}
        """None for one that every rank has for itself."""
        self._statistics = _statistics(model)
        # More than all ranks' marks of written ones add up to, in half precision too.
        self._reshaped = 2 * (axis.size + 1)

    def __len__(self) -> int:
        return len(self._settled)

    def marks(self) -> list[int]:
        """Of each buffer whether it has been written since the last `share`: 0, 1, or more if its shape is another.

        They come in an order that is the same on all ranks, which add them up.
        """
        now = dict(self._model.named_buffers())
        return [self._mark(settled, now.get(name)) for name, settled in self._settled.items()]

    def share(self, marks: Sequence[float]) -> None:
        """Give every rank the buffers of rank 0 that any rank has written. Every rank of the axis must call it.

        Of a buffer whose shapes differ (a cache that grows with the batches of a rank) each rank keeps its own.

        Args:
            marks: The sums over the ranks.
        """
        if not any(marks):
            return
        now = dict(self._model.named_buffers())
        written = {name: mark for name, mark in zip(self._settled, marks, strict=True) if mark}
        self._set_apart({name: _shape(now.get(name)) for name, mark in written.items() if mark > self._axis.size})
        names = [name for name in written if self._settled[name] is not None]
        unread = tuple(now[name] for name in names if name in self._statistics)
        with _unsafe_preserve_version_counter(unread):
            broadcast_tensors([now[name] for name in names], self._axis, label=_LABEL)
        for name in names:
            self._settled[name] = now[name].detach().clone()

    def _mark(self, settled: Tensor | None, now: Tensor | None) -> int:
        if settled is None:
            return 0
        if now is None or _shape(now) != _shape(settled):
            return self._reshaped
        return int(not _same(now, settled))

    def _set_apart(self, shapes: dict[str, object]) -> None:
        """Leave each rank its own of those buffers that are not alike on all."""
        heard = gather_values(shapes, self._axis, label=_LABEL) if shapes else []
        for name, shape in shapes.items():
            if shape is None or any(theirs[name] != shape for theirs in heard):
                self._settled[name] = None
                logger.info("the buffer %s has another shape on each rank: each keeps its own from now on", name)


def _statistics(model: nn.Module) -> set[str]:
    """Names of the buffers that batch norm writes, which its backward does not read where its forward wrote them.

    Autograd keeps them nevertheless, and would refuse another backward through the same forward if it saw them change.
    """
    norms = [
        (name, module) for name, module in model.named_modules() if isinstance(module, nn.modules.batchnorm._NormBase)
    ]
    return {f"{name}.{buffer}" if name else buffer for name, module in norms for buffer in module._buffers}


def _shape(buffer: Tensor | None) -> object:
    """All that must be alike for one to be written over the other."""
    if buffer is None:
        return None
    return buffer.shape, buffer.dtype, buffer.layout, 0 if buffer.layout == torch.strided else buffer._nnz()


def _same(one: Tensor, other: Tensor) -> bool:
    if one.layout == torch.strided:
        return torch.equal(one, other)
    return all(map(torch.equal, memory_of(one), memory_of(other)))
