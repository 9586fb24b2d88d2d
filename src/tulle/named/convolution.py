"""Convolution in one to three named dimensions, which may be split: neighbours lend each other their borders."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch.nn.functional as F

from tulle.errors import ModelError
from tulle.named.dims import Dim, Dims, spelled, united
from tulle.named.placed import Local, aligned, label_of, shared_scope
from tulle.named.relayout import Mover, check_once
from tulle.named.scope import Scope
from tulle.named.tensor import Tensor

_CONVOLVE = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


@dataclass(frozen=True, slots=True)
class Window:
    """A kernel along one dimension.

    Args:
        over: The dimension of the image that it moves along.
        kernel: Its own dimension, of the weight.
        out: The dimension that it makes of `over`.
        stride: How far it moves at a time.
        before: Zeros in front of the image.
    """

    over: Dim
    kernel: Dim
    out: Dim
    stride: int
    before: int


def convolution(
    image: Tensor,
    weight: Tensor,
    over: Sequence[tuple[Dim, Dim]],
    channels: tuple[Dim, Dim],
    *,
    stride: int = 1,
    padding: Literal["same", "valid"] = "same",
    out: Sequence[Dim] = (),
) -> Tensor:
    """Slide a kernel over one to three dimensions of an image, any of which may be split.

    Args:
        image: Has the dimensions that are moved along and the channels that come in; others are walked through.
        weight: Has the kernel's dimensions and both kinds of channels.
        over: Pairs of an image's dimension and the kernel's dimension that moves along it.
        channels: Those that come in, and those that go out.
        stride: How far the kernel moves at a time.
        padding: `"same"` adds zeros so that the result has `size / stride` entries, `"valid"` adds none.
        out: The result's dimensions in place of those moved along, where their sizes differ from these.

    Returns:
        The image's other dimensions, then `out`, then the channels that go out.

    Raises:
        ModelError: If a dimension is missing or `out` is not of the right size.
        PlanError: If the operation is not legal in the layout, or a part is no multiple of the stride.
    """
    incoming, outgoing = channels
    windows = [_window(one, kernel, stride, padding, out[n : n + 1]) for n, (one, kernel) in enumerate(over)]
    moved = tuple(window.over for window in windows)
    kernels = tuple(window.kernel for window in windows)
    scope = shared_scope([image, weight], "convolution")
    walked = tuple(dim for dim in image.dims if dim not in (*moved, incoming))
    dims = (*walked, *(window.out for window in windows), outgoing)
    check_once(dims, "convolution")
    split = scope.axes(united(image.dims, weight.dims), "convolution over")
    scope.axes(dims, "convolution to")
    for kernel in kernels:
        if scope.axis(kernel):
            raise ModelError(f"convolution was given a kernel whose dimension {kernel!r} is split: leave it whole")
    label = label_of("convolution", dims)
    axes = [tuple(sorted(axis for axis in split if split[axis] not in one.dims)) for one in (image, weight)]
    local = aligned(image.entered(axes[0], label), image.dims, (*walked, incoming, *moved))
    for place, window in enumerate(windows, start=len(walked) + 1):
        local = _bordered(local, place, window, scope, label)
    kernel = aligned(weight.entered(axes[1], label), weight.dims, (outgoing, incoming, *kernels))
    sizes = local.shape[: len(walked)]
    result = _CONVOLVE[len(windows)](
        local.reshape(math.prod(sizes), *local.shape[len(walked) :]), kernel, stride=stride
    )
    result = result.view(*sizes, *result.shape[1:]).movedim(len(walked), -1)
    return _laid_out(result, scope, windows, dims, incoming, label)


def _window(over: Dim, kernel: Dim, stride: int, padding: str, out: Sequence[Dim]) -> Window:
    if padding == "same":
        size = -(-over.size // stride)
        before = max(0, (size - 1) * stride + kernel.size - over.size) // 2
    else:
        size, before = (over.size - kernel.size) // stride + 1, 0
    given = out[0] if out else over
    if given.size != size:
        raise ModelError(f"convolution along {over!r} gives {size} entries, not {given!r}: name a dimension of {size}")
    return Window(over, kernel, given, stride, before)


def _bordered(local: Local, place: int, window: Window, scope: Scope, label: str) -> Local:
    """This rank's part with the entries that its own results need on both sides."""
    axis, length = scope.axis(window.over), local.shape[place]
    results = window.out.size if axis is None else -(-length // window.stride)
    after = (results - 1) * window.stride + window.kernel.size - window.before - length
    if axis is None:
        width = [0, 0] * (local.dim() - 1 - place) + [window.before, after]
        return F.pad(local, width)
    if length % window.stride:
        raise ModelError(
            f"convolution with stride {window.stride} along {window.over!r}, of which each rank of axis {axis!r} has "
            f"{length}: split it over fewer ranks, or choose another stride"
        )
    bordered = scope.wire.halo(local, axis, place, window.before, max(after, 0), label)
    return bordered.narrow(place, 0, window.before + length + after)


def _laid_out(result: Local, scope: Scope, windows: Sequence[Window], dims: Dims, incoming: Dim, label: str) -> Tensor:
    """Bring results from the image's splitting to that of their own dimensions."""
    over = {window.out: window.over for window in windows}
    before = [scope.axis(over.get(dim, dim)) for dim in dims]
    axis = scope.axis(incoming)
    pending = (axis,) if axis else ()
    uneven = [
        window for window in windows if scope.axis(window.over) and window.out.size * window.stride != window.over.size
    ]
    if uneven:
        raise ModelError(
            f"convolution along {spelled([uneven[0].over])}, which is split, must give its size by the stride: "
            "use padding 'same', or leave it whole"
        )
    mover = Mover(scope, result, label, before, pending)
    return Tensor(mover.move([scope.axis(dim) for dim in dims]), dims, mover.pending)
