"""`PlannedWire`: a mesh on paper. Exchanges give tensors of the right shape without numbers, and are written down."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import torch
from torch import Tensor

from tulle.comm import Deferred
from tulle.named.ledger import Ledger
from tulle.named.wire import GatherBackward, Reduction

Kind = Literal["all-reduce", "all-gather", "all-to-all", "halo"]


@dataclass(frozen=True, slots=True)
class Collective:
    """One exchange on paper, as `tulle.comm` would count it on each rank.

    Args:
        kind: What it is; a reduce-scatter is an all-to-all and a local sum.
        axes: The axes whose ranks take part.
        label: The operation that needs it.
        tensor_bytes: Bytes of this rank's tensor before it.
        bytes_sent: Payload that this rank sends.
        messages: Messages that it sends.
    """

    kind: Kind
    axes: tuple[str, ...]
    label: str
    tensor_bytes: int
    bytes_sent: int
    messages: int


@dataclass(slots=True)
class PlannedWire:
    """The wire of a mesh that need not be there, seen from its first rank.

    Args:
        sizes: Number of ranks along each axis.
    """

    sizes: Mapping[str, int]
    ranks: Mapping[str, int] = field(init=False)
    device: torch.device = field(default_factory=lambda: torch.device("meta"))
    collectives: list[Collective] = field(default_factory=list)
    """What would have been sent, in order."""
    ledger: Ledger | None = None
    """Who wants to know to which line an exchange belongs."""

    def __post_init__(self) -> None:
        self.ranks = dict.fromkeys(self.sizes, 0)

    def note(self, kind: Kind, tensor: Tensor, axes: Sequence[str], label: str) -> None:
        """Write an exchange down."""
        n, size_bytes = math.prod(self.sizes[axis] for axis in axes), tensor.numel() * tensor.element_size()
        sent_bytes, messages = {
            "all-reduce": (round(2 * (n - 1) / n * size_bytes), 2 * (n - 1)),
            "all-gather": ((n - 1) * size_bytes, n - 1),
            "all-to-all": ((n - 1) * size_bytes // n, n - 1),
        }[kind]
        self._write(kind, axes, label, size_bytes, (sent_bytes, messages))

    def _write(self, kind: Kind, axes: Sequence[str], label: str, tensor_bytes: int, sent: tuple[int, int]) -> None:
        self.collectives.append(Collective(kind, tuple(axes), label, tensor_bytes, *sent))
        if self.ledger is not None:
            line = self.ledger.line()
            line.bytes_sent += sent[0]
            line.messages += sent[1]
            line.collectives[kind] = line.collectives.get(kind, 0) + 1

    def enter(self, tensor: Tensor, axes: Sequence[str], label: str) -> Tensor:
        """*f*."""
        return self._travels(tensor, _alike, lambda gradient: self._summed(gradient, axes, label))

    def leave(self, tensor: Tensor, axes: Sequence[str], label: str) -> Tensor:
        """*g*."""
        return self._travels(tensor, lambda part: self._summed(part, axes, label), _alike)

    def gather(self, tensor: Tensor, axis: str, dim: int, label: str, backward: GatherBackward = "slice") -> Tensor:
        """All-gather."""
        is_sum = backward == "reduce_scatter"
        return self._travels(
            tensor,
            lambda part: self._gathered(part, axis, dim, label),
            lambda gradient: self._scattered(gradient, axis, dim, label if is_sum else None),
        )

    def scatter(self, tensor: Tensor, axis: str, dim: int, label: str) -> Tensor:
        """Slice."""
        return self._travels(
            tensor,
            lambda whole: self._scattered(whole, axis, dim, None),
            lambda gradient: self._gathered(gradient, axis, dim, label),
        )

    def reduce_scatter(self, tensor: Tensor, axis: str, dim: int, label: str) -> Tensor:
        """Reduce-scatter."""
        return self._travels(
            tensor,
            lambda part: self._scattered(part, axis, dim, label),
            lambda gradient: self._gathered(gradient, axis, dim, label),
        )

    def exchange(self, tensor: Tensor, axis: str, split_dim: int, join_dim: int, label: str) -> Tensor:
        """All-to-all."""
        return self._travels(
            tensor,
            lambda part: self._exchanged(part, axis, split_dim, join_dim, label),
            lambda gradient: self._exchanged(gradient, axis, join_dim, split_dim, label),
        )

    def halo(self, tensor: Tensor, axes: Sequence[str], dim: int, before: int, after: int, label: str) -> Tensor:
        """Halo exchange, as the first rank sees it: one inside lends to both sides, up to twice as much."""
        entry_bytes = tensor.nbytes // max(1, tensor.shape[dim])
        length, n = tensor.shape[dim], math.prod(self.sizes[axis] for axis in axes)
        lent = [max(0, min(before - rank * length, length)) for rank in range(n - 1)]
        borrowed = [max(0, min(after - rank * length, length)) for rank in range(n - 1)]

        def extended(part: Tensor) -> Tensor:
            # The first rank lends to those after it, and borrows from them.
            self._write("halo", axes, label, part.nbytes, _counted(lent, entry_bytes))
            return part.new_empty([*part.shape[:dim], before + length + after, *part.shape[dim + 1 :]])

        def shortened(gradient: Tensor) -> Tensor:
            self._write("halo", axes, label, gradient.nbytes, _counted(borrowed, entry_bytes))
            return gradient.narrow(dim, before, length)

        return self._travels(tensor, extended, shortened)

    def reduce(self, tensor: Tensor, axes: Sequence[str], op: Reduction, label: str) -> Tensor:
        """All-reduce."""
        self.note("all-reduce", tensor, axes, label)
        return tensor

    def start_sum(self, tensor: Tensor, axes: Sequence[str], label: str) -> Deferred[Tensor]:
        """All-reduce of parameter gradients."""
        self.note("all-reduce", tensor, axes, label)
        return Deferred(lambda: tensor)

    def _travels(
        self, tensor: Tensor, forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor], Tensor]
    ) -> Tensor:
        return cast("Tensor", _Travels.apply(tensor, forward, backward))

    def _summed(self, tensor: Tensor, axes: Sequence[str], label: str) -> Tensor:
        self.note("all-reduce", tensor, axes, label)
        return torch.empty_like(tensor, memory_format=torch.contiguous_format)

    def _gathered(self, part: Tensor, axis: str, dim: int, label: str) -> Tensor:
        self.note("all-gather", part, (axis,), label)
        return torch.cat([part] * self.sizes[axis], dim)

    def _scattered(self, whole: Tensor, axis: str, dim: int, label: str | None) -> Tensor:
        if label is not None:
            self.note("all-to-all", whole, (axis,), label)
        return whole.chunk(self.sizes[axis], dim)[0].contiguous()

    def _exchanged(self, part: Tensor, axis: str, split_dim: int, join_dim: int, label: str) -> Tensor:
        self.note("all-to-all", part, (axis,), label)
        return torch.cat(part.chunk(self.sizes[axis], split_dim), join_dim)


class _Travels(torch.autograd.Function):
    """Something that is sent forward and something that is sent backward."""

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor], Tensor]
    ) -> Tensor:
        ctx.backward_of = backward
        return forward(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return ctx.backward_of(gradients[0]), None, None


def _counted(entries: Sequence[int], entry_bytes: int) -> tuple[int, int]:
    """Bytes and messages of parts of so many entries."""
    return sum(entries) * entry_bytes, sum(1 for count in entries if count)


def _alike(tensor: Tensor) -> Tensor:
    return tensor.view_as(tensor)
