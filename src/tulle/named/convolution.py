"""Convolution in one to three named dimensions, which may be split: neighbours lend each other their borders.

convolution               out[o] = sum over k of image[o stride + k dilation - before] weight[k]
transposed_convolution    out[i stride + k dilation - before] += image[i] weight[k]: the adjoint, which enlarges
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch.nn.functional as F

from tulle.errors import ModelError, PlanError
from tulle.named.dims import Dim, as_dims, united
from tulle.named.neighbours import bordered
from tulle.named.placed import Local, aligned, label_of, record, shared_scope
from tulle.named.relayout import Mover
from tulle.named.scope import Scope
from tulle.named.tensor import Tensor

Padding = Literal["same", "valid"]
Along = tuple[Dim, Dim] | tuple[Dim, Dim, Dim]
"""An image's dimension, the kernel's dimension that moves along it, and what it makes of it if sizes differ."""
_CONVOLVE = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_SPREAD = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


@dataclass(frozen=True, slots=True)
class Window:
    """A kernel along one dimension.

    Args:
        over: The dimension of the image that it moves along.
        kernel: Its own dimension, of the weight.
        out: The dimension that it makes of `over`.
        stride: How far it moves at a time, along the larger of the two.
        dilation: Distance between its entries.
        before: Zeros in front of the larger of the two.
    """

    over: Dim
    kernel: Dim
    out: Dim
    stride: int
    dilation: int
    before: int

    @property
    def span(self) -> int:
        """From the kernel's first entry to its last."""
        return (self.kernel.size - 1) * self.dilation + 1

    @property
    def is_even(self) -> bool:
        """Whether parts of the image make equal parts of the result."""
        large, small = max(self.over.size, self.out.size), min(self.over.size, self.out.size)
        return small * self.stride == large


def convolution(
    image: Tensor,
    weight: Tensor,
    over: Sequence[Along],
    channels: tuple[Dim, Dim],
    *,
    stride: int = 1,
    dilation: int = 1,
    padding: Padding = "same",
) -> Tensor:
    """Slide a kernel over one to three dimensions of an image, any of which may be split.

    Args:
        image: Has the dimensions that are moved along and the channels that come in; others are walked through.
        weight: Has the kernel's dimensions and both kinds of channels.
        over: For each dimension that is moved along, it and the kernel's own; and the result's, where sizes differ.
        channels: Those that come in, and those that go out.
        stride: How far the kernel moves at a time.
        dilation: Distance between the kernel's entries.
        padding: `"same"` adds zeros so that the result has `size / stride` entries, `"valid"` adds none.

    Returns:
        The image's other dimensions, then those that were moved along, then the channels that go out.

    Raises:
        ModelError: If a dimension is missing, or the result's is not of the right size.
        PlanError: If the operation is not legal in the layout, or parts of the image do not make parts of the result.

    Example:
        >>> import torch
        >>> from tulle import named as tn
        >>> width, offset, c, e = tn.dims(width=4, offset=3, c=1, e=1)
        >>> image = tn.from_torch(torch.arange(4.0).view(4, 1), (width, c))
        >>> kernel = tn.from_torch(torch.ones(3, 1, 1), (offset, c, e))
        >>> tn.convolution(image, kernel, [(width, offset)], (c, e)).local.flatten().tolist()
        [1.0, 3.0, 6.0, 5.0]
    """
    _check_steps("convolution", stride, dilation)
    windows: list[Window] = []
    for dim, kernel, *out in _alongs("convolution", over):
        span = (kernel.size - 1) * dilation + 1
        size = -(-dim.size // stride) if padding == "same" else (dim.size - span) // stride + 1
        made = _made("convolution", dim, out, size, size)
        before = max(0, (size - 1) * stride + span - dim.size) // 2 if padding == "same" else 0
        windows.append(Window(dim, kernel, made, stride, dilation, before))
    return _slid("convolution", image, weight, windows, channels, _convolved)


def transposed_convolution(
    image: Tensor,
    weight: Tensor,
    over: Sequence[Along],
    channels: tuple[Dim, Dim],
    *,
    stride: int = 1,
    dilation: int = 1,
    padding: Padding = "same",
) -> Tensor:
    """The adjoint of `convolution` in the image: each entry is spread out by the kernel, `stride` apart.

    Args and errors are those of `convolution`. With padding `"same"` the result has `size * stride` entries, or up to
    `stride - 1` fewer if its dimension has; with `"valid"` all that the kernel reaches.

    Example:
        >>> import torch
        >>> from tulle import named as tn
        >>> width, wide, offset, c, e = tn.dims(width=2, wide=4, offset=2, c=1, e=1)
        >>> image = tn.from_torch(torch.tensor([[1.0], [5.0]]), (width, c))
        >>> kernel = tn.from_torch(torch.ones(2, 1, 1), (offset, c, e))
        >>> tn.transposed_convolution(image, kernel, [(width, offset, wide)], (c, e), stride=2).local.flatten().tolist()
        [1.0, 1.0, 5.0, 5.0]
    """
    _check_steps("transposed_convolution", stride, dilation)
    windows: list[Window] = []
    for dim, kernel, *out in _alongs("transposed_convolution", over):
        span = (kernel.size - 1) * dilation + 1
        most = dim.size * stride if padding == "same" else (dim.size - 1) * stride + span + stride - 1
        usual = most if padding == "same" else most - stride + 1
        made = _made("transposed_convolution", dim, out, usual, most, least=most - stride + 1)
        before = max(0, (dim.size - 1) * stride + span - made.size) // 2 if padding == "same" else 0
        windows.append(Window(dim, kernel, made, stride, dilation, before))
    return _slid("transposed_convolution", image, weight, windows, channels, _spread)


def _check_steps(what: str, stride: int, dilation: int) -> None:
    if stride < 1 or dilation < 1:
        raise ModelError(f"{what} was given stride={stride} and dilation={dilation}, expected 1 or more")


def _alongs(what: str, over: Sequence[Along]) -> Sequence[Along]:
    """What is moved along; one pair without its list looks like two names with sizes, as a dimension is a tuple too.

    Raises:
        ModelError: If it is no list of pairs or triples of dimensions.
    """
    if any(isinstance(one, Dim) or not isinstance(one, tuple | list) or len(one) not in (2, 3) for one in over):
        raise ModelError(f"{what} was given {over!r} to move along, expected a list such as [(width, kernel)]")
    for one in over:
        as_dims(one)
    return over


def _made(what: str, over: Dim, out: Sequence[Dim], usual: int, most: int, *, least: int | None = None) -> Dim:
    """The dimension of the result along one that is moved along."""
    made = out[0] if out else over
    if not (usual if least is None else least) <= made.size <= most:
        raise ModelError(f"{what} along {over!r} gives {usual} entries, not {made!r}: name a dimension of {usual}")
    return made


Slide = Callable[[Local, Local, Sequence[Window], Scope, str], Local]
"""From (others, incoming, *over) and the kernel to (others, outgoing, *out), this rank's parts."""


def _slid(
    what: str, image: Tensor, weight: Tensor, windows: Sequence[Window], channels: tuple[Dim, Dim], slide: Slide
) -> Tensor:
    scope, (incoming, outgoing) = shared_scope([image, weight], what), channels
    kernels, moved = tuple(window.kernel for window in windows), tuple(window.over for window in windows)
    for dim in (*moved, incoming):
        image.place(dim, what)
    if set(weight.dims) != {*kernels, *channels} or len(windows) not in _CONVOLVE:
        raise ModelError(
            f"{what} was given the weight {weight!r} for kernels {kernels!r} and channels {channels!r}: it must have "
            "just these dimensions, one to three of them the kernel's"
        )
    walked = tuple(dim for dim in image.dims if dim not in (*moved, incoming))
    dims = (*walked, *(window.out for window in windows), outgoing)
    split = scope.axes(united(image.dims, weight.dims), f"{what} over")
    scope.axes(dims, f"{what} to")
    _check_parts(what, windows, scope)
    record("product", [image, weight], (*walked, *moved, outgoing, incoming, *kernels), dims)
    label = label_of(what, dims)
    axes = [tuple(sorted(axis for axis in split if split[axis] not in one.dims)) for one in (image, weight)]
    local = aligned(image.entered(axes[0], label), image.dims, (*walked, incoming, *moved))
    kernel = aligned(weight.entered(axes[1], label), weight.dims, (outgoing, incoming, *kernels)).contiguous()
    sizes = local.shape[: len(walked)]
    result = slide(local.reshape(math.prod(sizes), *local.shape[len(walked) :]), kernel, windows, scope, label)
    result = result.reshape(*sizes, *result.shape[1:]).movedim(len(walked), -1)
    over = {window.out: window.over for window in windows}
    before = [scope.axes_of(over.get(dim, dim)) for dim in dims]
    mover = Mover(scope, result, label, before, tuple(sorted(scope.axes_of(incoming))))
    return Tensor(*mover.laid_out_as(dims))


def _convolved(local: Local, kernel: Local, windows: Sequence[Window], scope: Scope, label: str) -> Local:
    for place, window in enumerate(windows, start=2):
        length = local.shape[place]
        results = window.out.size // scope.parts_of(window.over)
        after = (results - 1) * window.stride + window.span - window.before - length
        local = bordered(scope, local, scope.axes_of(window.over), place, (window.before, max(after, 0)), label)
        local = local.narrow(place, 0, window.before + length + after)
    options = [tuple(getattr(window, name) for window in windows) for name in ("stride", "dilation")]
    return _CONVOLVE[len(windows)](local, kernel, stride=options[0], dilation=options[1])


def _spread(local: Local, kernel: Local, windows: Sequence[Window], scope: Scope, label: str) -> Local:
    cuts: list[tuple[int, int]] = []
    for place, window in enumerate(windows, start=2):
        length = local.shape[place]
        results = window.out.size // scope.parts_of(window.over)
        # The first and the last entry that the kernel brings to this rank's results, counted from its own first.
        first = -((window.span - 1 - window.before) // window.stride)
        last = (results - 1 + window.before) // window.stride
        borders = (max(0, -first), max(0, last - length + 1)) if scope.axes_of(window.over) else (0, 0)
        local = bordered(scope, local, scope.axes_of(window.over), place, borders, label)
        cuts.append((borders[0] * window.stride + window.before, results))
    options = [tuple(getattr(window, name) for window in windows) for name in ("stride", "dilation")]
    kernel = kernel.transpose(0, 1).contiguous()
    spread = _SPREAD[len(windows)](local, kernel, stride=options[0], dilation=options[1])
    for place, (begin, length) in enumerate(cuts, start=2):
        missing = max(0, begin + length - spread.shape[place])  # where a stride is wider than the kernel
        spread = F.pad(spread, [0, 0] * (spread.dim() - 1 - place) + [0, missing]).narrow(place, begin, length)
    return spread


def _check_parts(what: str, windows: Sequence[Window], scope: Scope) -> None:
    """Refuse layouts under which parts of the image do not make equal parts of the result.

    Raises:
        PlanError: Naming the dimension.
    """
    scope.check_whole([window.kernel for window in windows], f"{what} has kernels along")
    scope.check_whole([one.over for one in windows if not one.is_even], f"{what} gives sizes not by the stride along")
    for window in windows:
        parts = scope.parts_of(window.over)
        if window.out.size % parts:
            raise PlanError(
                f"{what} with stride {window.stride} along {window.over!r}, of which each of {parts} ranks has "
                f"{window.over.size // parts}, cannot give each a part of {window.out!r}: split it over fewer ranks, "
                "or choose another stride"
            )
