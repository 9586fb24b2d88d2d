"""`Buffers`: finds which of a model's buffers a step has written, and gives all ranks those of rank 0.

DDP sends all buffers before every forward, masks and position tables too; many users turn that off, and lose the
statistics of batch norm with it. Here a buffer travels when its values differ from what they were: a comparison with
a copy costs a pass over memory, and sees what version counters miss (batch norm's kernels, writes through `.data`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from tulle.engine.replicas import broadcast_tensors
from tulle.mesh import Axis


class Buffers:
    """The buffers of one model, and what they were after the last synchronization.

    Args:
        model: Whose buffers.
        axis: Whose ranks hold replicas.
    """

    def __init__(self, model: nn.Module, axis: Axis) -> None:
        self._model = model
        self._axis = axis
        self._settled = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}

    def __len__(self) -> int:
        return len(self._settled)

    def written(self) -> list[bool]:
        """Which buffers have other values than after the last `share`, in an order that is the same on all ranks."""
        now = dict(self._model.named_buffers())
        return [name in now and not _same(now[name], settled) for name, settled in self._settled.items()]

    def share(self, written: Sequence[bool]) -> None:
        """Give every rank the buffers of rank 0 that any rank has written. Every rank of the axis must call it."""
        if not any(written):
            return
        now = dict(self._model.named_buffers())
        names = [name for name, is_written in zip(self._settled, written, strict=True) if is_written and name in now]
        broadcast_tensors([now[name] for name in names], self._axis, label="buffers")
        for name in names:
            self._settled[name] = now[name].detach().clone()


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)
