"""Memory that exchanges receive into, used again by the next: fresh memory costs as much as the copy into it.

A page that a process touches for the first time is a trap into the kernel, and the C library gives large blocks back as
soon as they are free. On CUDA torch's allocator keeps them already.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tulle.mesh import Axis

_KEPT = 2
_SMALL_BYTES = 128 * 1024


def scratch(shape: Sequence[int], like: Tensor, axis: Axis) -> Tensor:
    """Uninitialized memory of a shape, of the dtype and device of another tensor; `release` gives it back."""
    size_bytes = math.prod(shape) * like.element_size()
    if like.device.type != "cpu" or size_bytes < _SMALL_BYTES:
        return like.new_empty(shape)
    free: list[Tensor] = axis.kept.setdefault(scratch, [])
    fitting = [block for block in free if block.numel() >= size_bytes]
    if not fitting:
        return like.new_empty(shape)
    block = min(fitting, key=Tensor.numel)
    free[:] = [other for other in free if other is not block]
    return block[:size_bytes].view(like.dtype).view(*shape)


def release(received: Tensor, axis: Axis) -> None:
    """Let the next exchange use what an exchange of this axis received: nobody may hold a view of it any more."""
    if axis.size == 1 or received.device.type != "cpu" or received.nbytes < _SMALL_BYTES:
        return  # alone, a rank receives what it gave
    block = torch.empty(0, dtype=torch.uint8).set_(received.untyped_storage())
    free: list[Tensor] = axis.kept.setdefault(scratch, [])
    free.append(block)
    free.sort(key=Tensor.numel)
    del free[:-_KEPT]


def let_go(axis: Axis) -> None:
    """Give what is kept for the next exchange back to the program: the next will not be like those before."""
    axis.kept.pop(scratch, None)
