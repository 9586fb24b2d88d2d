"""`Piece` and `Bucket`: how parameters that lie end to end are dealt to ranks, equally to one element.

a bucket of parameters     | weight ......... | bias | weight .............. |
rank 0 of 3 steps          |============|
rank 1                                  |=============|
rank 2                                                |=====================|
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

BUCKET_BYTES = 25 * 1024 * 1024


@dataclass(slots=True, eq=False)
class Piece:
    """What one rank steps of one parameter: elements `start` to `stop` in the order in which they lie in memory."""

    parameter: nn.Parameter
    start: int
    stop: int
    tensor: nn.Parameter | None = None
    """What the optimizer steps, on the rank that owns the piece."""


@dataclass(frozen=True, slots=True, eq=False)
class Bucket:
    """Parameters whose pieces travel together: by rank, what it steps of them."""

    pieces: tuple[tuple[Piece, ...], ...]

    @property
    def lengths(self) -> list[int]:
        """Number of elements that each rank steps."""
        return [sum(piece.stop - piece.start for piece in pieces) for pieces in self.pieces]


def lay_out(parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Cut parameters into buckets of one dtype and device each."""
    open_buckets: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
    filled_bytes: Counter[tuple[torch.dtype, torch.device]] = Counter()
    for parameter in parameters:
        kind = parameter.dtype, parameter.device
        open_buckets.setdefault(kind, []).append(parameter)
        filled_bytes[kind] += parameter.nbytes
        if filled_bytes[kind] >= BUCKET_BYTES:
            del filled_bytes[kind]
            yield open_buckets.pop(kind)
    yield from open_buckets.values()


def deal(parameters: Sequence[nn.Parameter], ranks: int) -> Bucket:
    """Cut a bucket into as many consecutive parts as there are ranks, equal to one element.

    What has no elements is the first rank's: an optimizer keeps state for it, too, its count of steps say.
    """
    total = sum(p.numel() for p in parameters)
    ends = [total * (rank + 1) // ranks for rank in range(ranks)]
    pieces: list[list[Piece]] = [[] for _ in range(ranks)]
    begin = 0
    for parameter in parameters:
        for rank, end in enumerate(ends):
            first = max(begin, ends[rank - 1] if rank else 0)
            last = min(begin + parameter.numel(), end)
            if first < last or not (parameter.numel() or rank):
                pieces[rank].append(Piece(parameter, first - begin, max(first, last) - begin))
        begin += parameter.numel()
    return Bucket(tuple(tuple(mine) for mine in pieces))


def flat(tensor: Tensor) -> Tensor:
    """A dense tensor's numbers in the order in which they lie in memory, as a view."""
    return tensor.detach().as_subclass(Tensor).as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def laid_out_like(tensor: Tensor, like: Tensor) -> Tensor:
    """A tensor with the strides of another of its shape; a copy if it has others."""
    if tensor.stride() == like.stride():
        return tensor
    return torch.empty_like(like, dtype=tensor.dtype).copy_(tensor)
