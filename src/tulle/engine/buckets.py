"""`Bucket`: dense gradients that are reduced together, in one flat buffer that the gradients are views of.

    the buffer    | gradient 0 | gradient 1 | ... | flag 0 | flag 1 | ... | marks |

A flag tells how many ranks produced that gradient in this step, so that a parameter which no rank used keeps no
gradient, as in one process, without a message more. Marks tell which of the model's buffers any rank has written.

Source: Li et al., *PyTorch Distributed* (VLDB'20, section 3.2), gradient bucketing; DDP's `gradient_as_bucket_view`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby
from math import ceil

import torch
from torch import Tensor, nn

from tulle.comm import Pending, all_reduce, zeros
from tulle.engine.buffers import Buffers
from tulle.engine.means import as_mean
from tulle.engine.slots import Slot
from tulle.errors import GradientError, ModelError
from tulle.mesh import Axis

_COPY, _SCALE = vars(torch)["_foreach_copy_"], vars(torch)["_foreach_mul_"]  # documented, but not exported
FIRST_BUCKET_BYTES = 1024 * 1024
"""The first bucket is small, so that communication begins early (DDP's choice too)."""
LABEL = "dense gradients"
_SMALL_BYTES = 64 * 1024
"""A gradient below this takes less time than the call that divides it does, and is taken in with others."""
_TOGETHER_BYTES = 256 * 1024
"""So many bytes of them are taken in at once, while they are in the cache still."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class Bucket:
    """Gradients of one dtype and device that travel together. Every rank makes the same buckets.

    Args:
        slots: The parameters, in the order in which their gradients come.
        axis: Whose ranks reduce them.
        buffers: The model's buffers, if this bucket carries their marks.
        piece_bytes: It travels in equal pieces of about this, so that others can pass between; None for one piece.
    """

    slots: Sequence[Slot]
    axis: Axis
    buffers: Buffers | None = None
    piece_bytes: int | None = None
    missing: int = field(init=False)
    """Gradients that have not arrived in this backward."""
    _flat: Tensor = field(init=False)
    _views: list[Tensor] = field(init=False)
    _flags: Tensor = field(init=False)
    _pieces: Sequence[Tensor] = field(init=False)
    _sizes_bytes: list[int] = field(init=False)
    """Of each view."""
    _offsets: list[int] = field(init=False)
    """Where each view begins, and the last one ends."""
    _addresses: list[int] = field(init=False)
    """Of each view in memory."""
    _waiting: list[int] = field(init=False, default_factory=list)
    """Positions of small gradients that have arrived and are to be taken in."""
    _waiting_bytes: int = field(init=False, default=0)
    _references: tuple[int, list[int]] = field(init=False)
    """To the buffer and to each view as long as nobody else holds one."""
    _pending: list[Pending[Tensor]] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self.missing = len(self.slots)
        self._lay_out()

    def _lay_out(self) -> None:
        self._allocate()
        self._references = self._count_references()

    def _allocate(self) -> None:
        sizes = [slot.parameter.numel() for slot in self.slots]
        flags = len(sizes) + (len(self.buffers) if self.buffers else 0)
        options = self.slots[0].parameter if self.slots else torch.empty(0, device=self.axis.device)
        self._flat = zeros(sum(sizes) + flags, options, self.axis)
        self._sizes_bytes = [size * options.itemsize for size in sizes]
        self._offsets = [*accumulate(sizes, initial=0)]
        self._flags = self._flat[self._offsets[-1] :]
        self._views = [self._new_view(position) for position in range(len(sizes))]
        self._addresses = [view.data_ptr() for view in self._views]
        pieces = max(1, round(self._flat.nbytes / self.piece_bytes)) if self.piece_bytes else 1
        self._pieces = self._flat.split(max(1, ceil(self._flat.numel() / pieces)))

    def _new_view(self, position: int) -> Tensor:
        """Where a gradient lies in the buffer. To autograd it is no view, which `detach_()` would refuse."""
        part = self._flat[self._offsets[position] : self._offsets[position + 1]]
        return as_mean(_like(part, self.slots[position].parameter).data)

    def _in_place(self, position: int) -> Tensor:
        """The view of a gradient, anew if somebody gave it other memory: `p.grad.data = ...`."""
        if self._views[position].data_ptr() != self._addresses[position]:
            self._views[position] = self._new_view(position)
        return self._views[position]

    @property
    def piece_sizes_bytes(self) -> list[int]:
        """Bytes of each piece in which it travels."""
        return [piece.nbytes for piece in self._pieces]

    @property
    def gradients(self) -> list[tuple[nn.Parameter, Tensor]]:
        """Each parameter and the view that is its gradient."""
        return [(slot.parameter, view) for slot, view in zip(self.slots, self._views, strict=True)]

    @property
    def writes(self) -> int:
        """How often something was written to any of the gradients."""
        with torch._C.DisableTorchFunctionSubclass():  # what is late is only looked at as it is
            return sum([view._version for view in self._views])

    @property
    def needs_flags(self) -> bool:
        """Whether it must be waited for to know, on this rank, which parameters have gradients and buffers changed."""
        return bool(self.buffers) or not all(slot.is_fired for slot in self.slots)

    def arrive(self, position: int) -> None:
        """Take in the gradient of one slot, divided by the number of ranks; the parameter's gradient is then a view.

        Small ones wait for others, at the longest until all are there.
        """
        slot = self.slots[position]
        slot.arrive()
        if self.missing == len(self.slots):
            self._begin()
        self.missing -= 1
        size_bytes = self._sizes_bytes[position]
        if size_bytes >= _SMALL_BYTES:
            slot.check_there()
            with torch.no_grad():
                self._take(position)
            self._give(position)
        else:
            self._waiting.append(position)
            self._waiting_bytes += size_bytes
        if self._waiting and (not self.missing or self._waiting_bytes >= _TOGETHER_BYTES):
            self._take_together()

    def start(self) -> None:
        """Start the all-reduce; slots whose gradient did not come send what they have from before, or zeros."""
        for piece in range(len(self._pieces)):
            self.start_piece(piece)

    def start_piece(self, piece: int) -> None:
        """Start the all-reduce of one piece; the others may follow in any order that is that of all ranks."""
        if not self._pending:
            self._fill()
        self._pending.append(all_reduce(self._pieces[piece], self.axis, label=LABEL))

    @torch.no_grad()
    def _fill(self) -> None:
        """Complete what travels."""
        self._begin()
        if self._waiting:
            self._take_together()
        # Of all parameters in every step: most are in place, and told so by the least that tells it.
        others = [
            position
            for position, (slot, view) in enumerate(zip(self.slots, self._views, strict=True))
            if not (slot.is_arrived and slot.parameter.grad is view)
        ]
        for position in others:
            slot, has_gradient = self.slots[position], self.slots[position].parameter.grad is not None
            self._take(position)
            slot.is_fired = slot.is_fired and has_gradient
            if slot.is_fired:  # let the gradient that was copied go now, before the next bucket is filled
                self._give(position)
        flags = [slot.is_fired for slot in self.slots]
        if all(flags) and not self.buffers:
            self._flags.fill_(1)
        else:
            flags += self.buffers.marks() if self.buffers else []
            self._flags.copy_(torch.tensor(flags, dtype=self._flags.dtype), non_blocking=True)

    def finish(self) -> None:
        """Wait, give every parameter that any rank used its mean gradient, and share the buffers that any wrote."""
        assert len(self._pending) == len(self._pieces), "a bucket is finished after it was started"
        for pending in self._pending:
            pending.wait()
        self._pending.clear()
        # Reading flags waits for a GPU: only where this rank cannot know the answer.
        flags: list[float] = self._flags.real.tolist() if self.needs_flags else []
        for position, slot in enumerate(self.slots):
            if flags and flags[position] and not slot.is_arrived:
                self._give(position)
            slot.is_fired = slot.is_arrived = False
        self.missing = len(self.slots)
        if self.buffers:
            self.buffers.share(flags[len(self.slots) :])

    def alone(self) -> Callable[[Tensor], None]:
        """What completes one gradient, of a bucket that was started, when its parameter may be gone."""
        pending = [*self._pending]

        def complete(gradient: Tensor) -> None:
            for one in pending:
                one.wait()

        return complete

    def _begin(self) -> None:
        """Before the first gradient of a backward: leave the buffer to who holds gradients that parameters dropped.

        Whoever keeps gradients (of one task, to hold them against those of another) has them for good, as in torch.
        """
        if self.missing < len(self.slots):
            return
        if any(slot.parameter.dtype != self._flat.dtype for slot in self.slots):  # `model.to(torch.float64)`
            self._check_dtypes()
            self._lay_out()
        is_dropped = [slot.parameter.grad is not view for slot, view in zip(self.slots, self._views, strict=True)]
        buffer, views = self._count_references()
        own_buffer, own_views = self._references
        is_held = any(d and n > own for d, n, own in zip(is_dropped, views, own_views, strict=True))
        # A tensor that shares memory with a view does not say with which.
        if is_held or (any(is_dropped) and buffer > own_buffer):
            self._lay_out()

    def _check_dtypes(self) -> None:
        """Raise if some parameters have another dtype than others whose gradients travel with theirs."""
        first = self.slots[0]
        for slot in self.slots:
            if slot.parameter.dtype != first.parameter.dtype:
                raise GradientError(
                    f"{slot.name!r} is {slot.parameter.dtype} and {first.name!r} {first.parameter.dtype} by now, but "
                    "their gradients travel together since they had one dtype: convert all of the model, or parts of "
                    "it before tulle.distribute"
                )

    def _count_references(self) -> tuple[int, list[int]]:
        """To the buffer, from tensors that lie in it, and to each view."""
        storage = self._flat.untyped_storage()
        return torch._C._storage_Use_Count(storage._cdata), [sys.getrefcount(view) for view in self._views]

    @torch.no_grad()
    def _take_together(self) -> None:
        """Take in the small gradients that have arrived: a call for all to copy, one for neighbours to divide."""
        positions = sorted(self._waiting)
        self._waiting, self._waiting_bytes = [], 0
        slots, views = [self.slots[p] for p in positions], [self._views[p] for p in positions]
        if [view.data_ptr() for view in views] != [self._addresses[p] for p in positions]:
            views = [self._in_place(p) for p in positions]
        gradients = [slot.parameter.grad for slot in slots]
        dense = [one for one in gradients if one is not None and one.layout == torch.strided]
        try:
            if len(dense) < len(positions):
                for position in positions:
                    self.slots[position].check_there()
                    self._take(position)
            elif dense:
                _COPY(views, dense)  # nothing happens where the gradient is the view already
                _SCALE([*self._stretches(positions)], 1.0 / self.axis.size)
            for slot, view in zip(slots, views, strict=True):
                slot.parameter.grad = view
        except RuntimeError:
            self._check_unchanged()
            raise

    def _give(self, position: int) -> None:
        """Have a parameter hold its view as gradient."""
        try:
            self.slots[position].parameter.grad = self._views[position]
        except RuntimeError:
            self._check_unchanged()
            raise

    def _check_unchanged(self) -> None:
        """Raise if a parameter has been given another shape or dtype since the first backward."""
        for slot, view in zip(self.slots, self._views, strict=True):
            now, before = (
                f"{str(one.dtype).removeprefix('torch.')} {list(one.shape)}" for one in (slot.parameter, view)
            )
            if now != before:
                raise ModelError(
                    f"the parameter {slot.name!r} is {now}, and was {before} in the first backward: change shapes and "
                    "dtypes before tulle.distribute, or distribute a new model that has them"
                )

    def _stretches(self, positions: Sequence[int]) -> Iterator[Tensor]:
        """What gradients at these positions fill of the buffer, neighbours as one."""
        if positions[-1] - positions[0] == len(positions) - 1:
            yield self._flat[self._offsets[positions[0]] : self._offsets[positions[-1] + 1]]
            return
        for _, stretch in groupby(enumerate(positions), lambda numbered: numbered[1] - numbered[0]):
            neighbours = [position for _, position in stretch]
            yield self._flat[self._offsets[neighbours[0]] : self._offsets[neighbours[-1] + 1]]

    def _take(self, position: int) -> None:
        gradient, view = self.slots[position].parameter.grad, self._in_place(position)
        if gradient is None:
            view.zero_()
        elif gradient.layout != torch.strided:  # a sparse gradient of a parameter that had dense ones so far
            view.copy_(gradient.to_dense()).div_(self.axis.size)
        elif gradient.shape != view.shape:  # torch would have the view grow over its neighbours
            self._check_unchanged()
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
