"""`Bucket`: dense gradients that are reduced together, in one flat buffer that the gradients are views of.

    the buffer    | gradient 0 | gradient 1 | ... | flag 0 | flag 1 | ... | marks |

A flag tells how many ranks produced that gradient in this step, so that a parameter which no rank used keeps no
gradient, as in one process, without a message more. Marks are the same for whatever else ranks must hear of.

Source: Li et al., *PyTorch Distributed* (VLDB'20, section 3.2), gradient bucketing; DDP's `gradient_as_bucket_view`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from tulle.comm import Pending, all_reduce
from tulle.errors import GradientError
from tulle.mesh import Axis

FIRST_BUCKET_BYTES = 1024 * 1024
"""The first bucket is small, so that communication begins early (DDP's choice too)."""
LABEL = "dense gradients"


@dataclass(slots=True, eq=False)
class Slot:
    """One trained parameter, and what this step's backward has done for it."""

    name: str
    parameter: nn.Parameter
    is_fired: bool = False
    """Whether a gradient has come since the last synchronization."""
    is_arrived: bool = False
    """Whether it has come in this backward, so that it can travel."""


@dataclass(slots=True, eq=False)
class Bucket:
    """Gradients of one dtype and device that travel together. Every rank makes the same buckets.

    Args:
        slots: The parameters, in the order in which their gradients come.
        axis: Whose ranks reduce them.
        marks: Number of further flags at the end of the buffer.
    """

    slots: Sequence[Slot]
    axis: Axis
    marks: int = 0
    missing: int = field(init=False)
    """Gradients that have not arrived in this backward."""
    _buffer: Tensor = field(init=False)
    _views: list[Tensor] = field(init=False)
    _flags: Tensor = field(init=False)
    _pending: Pending[Tensor] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.missing = len(self.slots)
        sizes = [slot.parameter.numel() for slot in self.slots]
        options = self.slots[0].parameter if self.slots else torch.empty(0, device=self.axis.device)
        self._buffer = torch.zeros(sum(sizes) + len(sizes) + self.marks, dtype=options.dtype, device=options.device)
        *parts, self._flags = self._buffer.split([*sizes, len(sizes) + self.marks])
        self._views = [_like(part, slot.parameter) for part, slot in zip(parts, self.slots, strict=True)]

    @torch.no_grad()
    def arrive(self, position: int) -> None:
        """Take in the gradient of one slot, divided by the number of ranks; the parameter's gradient is now a view."""
        slot = self.slots[position]
        if self._pending is not None:
            raise GradientError(
                f"the gradient of {slot.name!r} came again while its all-reduce is under way: use "
                "torch.utils.checkpoint with use_reentrant=False, and start anew after a backward that failed"
            )
        self._take(position)
        slot.parameter.grad = self._views[position]
        if not slot.is_arrived:
            slot.is_arrived = True
            self.missing -= 1

    @torch.no_grad()
    def start(self, marks: Sequence[bool] = ()) -> None:
        """Start the all-reduce; slots whose gradient did not come send what they have from before, or zeros."""
        for position, slot in enumerate(self.slots):
            if not slot.is_arrived or slot.parameter.grad is not self._views[position]:
                self._take(position)
            slot.is_fired = slot.is_fired and slot.parameter.grad is not None
        fired = [float(slot.is_fired) for slot in self.slots]
        told = torch.tensor([*fired, *map(float, marks)], dtype=self._flags.dtype)
        self._flags.copy_(told, non_blocking=True)
        self._pending = all_reduce(self._buffer, self.axis, label=LABEL)

    def finish(self) -> list[bool]:
        """Wait, give every parameter that any rank used its mean gradient, and return the marks that any rank set."""
        assert self._pending is not None, "a bucket is finished after it was started"
        self._pending.wait()
        self._pending = None
        all_fired = all(slot.is_fired for slot in self.slots)
        # Reading flags waits for a GPU: only where this rank cannot know the answer.
        flags = self._flags.tolist() if self.marks or not all_fired else []
        for position, slot in enumerate(self.slots):
            if not slot.is_arrived and (slot.is_fired or flags[position] > 0):
                slot.parameter.grad = self._views[position]
            slot.is_fired = slot.is_arrived = False
        self.missing = len(self.slots)
        return [flag > 0 for flag in flags[len(self.slots) :]]

    def _take(self, position: int) -> None:
        gradient, view = self.slots[position].parameter.grad, self._views[position]
        if gradient is None:
            view.zero_()
        elif gradient.layout != torch.strided:  # a sparse gradient of a parameter that had dense ones so far
            view.copy_(gradient.to_dense()).div_(self.axis.size)
        else:  # in place where the gradient is the view already
            torch.mul(gradient, 1.0 / self.axis.size, out=view)


def lay_out(slots: Sequence[Slot], bucket_bytes: int) -> Iterator[list[Slot]]:
    """Cut parameters, in the order in which their gradients come, into buckets of one dtype and device each."""
    open_buckets: dict[tuple[torch.dtype, torch.device], list[Slot]] = {}
    filled_bytes: dict[tuple[torch.dtype, torch.device], int] = {}
    limit_bytes = min(FIRST_BUCKET_BYTES, bucket_bytes)
    for slot in slots:
        kind = (slot.parameter.dtype, slot.parameter.device)
        open_buckets.setdefault(kind, []).append(slot)
        filled_bytes[kind] = filled_bytes.get(kind, 0) + slot.parameter.nbytes
        if filled_bytes[kind] >= limit_bytes:
            yield open_buckets.pop(kind)
            filled_bytes[kind] = 0
            limit_bytes = bucket_bytes
    yield from open_buckets.values()


def _like(part: Tensor, parameter: Tensor) -> Tensor:
    """View a flat part with the parameter's shape, and its strides where they leave no gap (channels last, say)."""
    if torch.ops.aten.is_non_overlapping_and_dense(parameter):
        return part.as_strided(parameter.shape, parameter.stride())
    return part.view(parameter.shape)
