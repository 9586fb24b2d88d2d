"""Dropout of tensors that are split over an axis: the mask of one process, or numbers of each rank's own.

Ranks of the axis draw the same numbers, so what they hold alike is dropped alike. Where they hold parts, equal masks
would repeat themselves from part to part.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.nn import functional

from tulle.tensor_parallel.region import Region


class SplitDropout(nn.Dropout):
    """`nn.Dropout` of a tensor whose dimension `dim` is split over the axis: draws the whole mask, takes its part.

    So the numbers are those of one process, and ranks draw equally many.
    """

    region: Region
    dim: int
    """The dimension that is split."""
    whole: int | None
    """Its whole length; None if it is split evenly."""

    def forward(self, input: Tensor) -> Tensor:
        """This rank's part of a tensor to this rank's part of it with values dropped."""
        if not self.training or not self.p:
            return input
        axis = self.region.axis
        shape = [*input.shape]
        shape[self.dim] = self.whole or shape[self.dim] * axis.size
        drawn = functional.dropout(_ones(shape, input), self.p)
        is_kept = drawn.tensor_split(axis.size, self.dim)[axis.rank] != 0  # a byte of each number waits for backward
        return torch.where(is_kept, input, 0.0) * (1 / (1 - self.p) if self.p < 1 else 0.0)


def _ones(shape: list[int], like: Tensor) -> Tensor:
    """Ones whose dimensions lie in memory as those of another tensor: a mask is drawn in that order."""
    outermost_first = sorted(range(like.dim()), key=like.stride, reverse=True)
    ones = like.new_ones([shape[dim] for dim in outermost_first])
    return ones.permute([outermost_first.index(dim) for dim in range(like.dim())])


class OwnRandomness:
    """Hooks between which a rank draws numbers of its own, for dropout inside of kernels and functions.

    All ranks draw one number from the stream that they share, as the seed of this stretch, and go on with the shared
    stream after it. The masks are not those of one process, and as random.
    """

    def __init__(self, region: Region) -> None:
        self._region = region
        self._shared: list[Tensor] = []

    def begin(self, module: nn.Module, *_: object) -> None:
        """Before forward: leave the shared stream, if the module is training."""
        self._shared.clear()  # recomputation stops a forward in the middle, as soon as it has what it needs
        if module.training:
            self._leave_shared()

    def end(self, *_: object) -> None:
        """After forward: go on with the stream of random numbers that all ranks share."""
        if self._shared:
            stream_of(self._region).set_state(self._shared.pop())

    @contextmanager
    def stretch(self, dropped: float) -> Iterator[None]:
        """The same as a context, where a share of the numbers is dropped."""
        if dropped:
            self._leave_shared()
        try:
            yield
        finally:
            self.end()

    def _leave_shared(self) -> None:
        seed = int(torch.randint(2**31, ()))
        stream = stream_of(self._region)
        self._shared.append(stream.get_state())
        stream.manual_seed(seed * 2_147_483_647 + self._region.axis.rank)

    def __deepcopy__(self, memo: object) -> OwnRandomness:
        """Of a copied model's own."""
        return OwnRandomness(self._region)


class BetweenLayers:
    """Hooks between a column and a row layer that were selected by name: what is drawn there is each rank's own.

    Ranks hold parts there, of unequal lengths perhaps. Would they draw from the stream that they share, masks would
    repeat themselves from part to part, and the streams would part, so that what ranks hold alike would be dropped
    unlike ever after. A stretch in which nobody draws leaves the shared stream as it was.
    """

    def __init__(self, region: Region, *, is_always: bool) -> None:
        self._region = region
        self._is_always = is_always
        self._shared: Tensor | None = None
        self._own: Tensor | None = None

    def begin(self, layer: nn.Module, *_: object) -> None:
        """After a column layer, the first of several: leave the shared stream, in training, or always."""
        if self._shared is None and (layer.training or self._is_always):
            stream = stream_of(self._region)
            self._shared = stream.get_state()
            stream.manual_seed(crc32(self._shared.numpy().tobytes()) * 2_147_483_647 + self._region.axis.rank)
            self._own = stream.get_state()

    def end(self, *_: object) -> None:
        """Before a row layer, and after what is around both: go on with the shared stream."""
        if self._shared is not None and self._own is not None:
            stream, shared = stream_of(self._region), self._shared
            has_drawn, self._shared = not torch.equal(stream.get_state(), self._own), None
            stream.set_state(shared)
            if has_drawn:
                torch.rand((), generator=stream, device=stream.device)  # so that the next stretch has another seed

    def __deepcopy__(self, memo: object) -> BetweenLayers:
        """Of a copied model's own."""
        return BetweenLayers(self._region, is_always=self._is_always)


def draw_apart(
    around: nn.Module,
    columns: Iterable[nn.Module],
    rows: Iterable[nn.Module],
    region: Region,
    *,
    is_always: bool = False,
) -> None:
    """Have ranks draw numbers of their own between column and row layers of one module.

    Args:
        around: The module.
        columns: After the first of which they do so.
        rows: Before which they no longer do.
        region: Whose ranks.
        is_always: Whether they do in evaluation too, as functions of dropout may.
    """
    between = BetweenLayers(region, is_always=is_always)
    for layer in columns:
        layer.register_forward_hook(between.begin)
    for layer in rows:
        layer.register_forward_pre_hook(between.end)
    around.register_forward_hook(between.end, always_call=True)


def stream_of(region: Region) -> torch.Generator:
    """From what ranks draw where they hold the same."""
    device = region.axis.device
    return torch.default_generator if device.type == "cpu" else torch.cuda.default_generators[device.index or 0]
