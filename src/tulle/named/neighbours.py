"""Neighbours: what looks at entries next to its own along a dimension; where it is split, only borders travel."""

from __future__ import annotations

import torch.nn.functional as F

from tulle.errors import ModelError
from tulle.named.dims import Dim, as_dims
from tulle.named.placed import Axes, Local, label_of, record, shared_scope
from tulle.named.relayout import Mover, fitting, splits_of
from tulle.named.reshape import resized
from tulle.named.scope import Scope
from tulle.named.tensor import Tensor


def shift(tensor: Tensor, dim: Dim, by: int = 1, *, wrap: bool = False) -> Tensor:
    """Move entries `by` places up along a dimension (down if negative); zeros, or what falls out, come in.

    Only what crosses from rank to rank travels, unless it wraps around.
    """
    place, before, after = tensor.place(dim, "shift"), max(by, 0), max(-by, 0)
    if wrap:
        return resized(tensor, place, dim, lambda whole: whole.roll(by, place))
    label, length = label_of("shift", tensor.dims), tensor.scope.local_size(dim)
    window = bordered(tensor.scope, tensor.local, tensor.scope.axes_of(dim), place, (before, after), label)
    return tensor.with_part(window.narrow(place, after, length))


def halo(tensor: Tensor, dim: Dim, into: tuple[Dim, Dim], *, before: int = 0) -> Tensor:
    """Cut a dimension into blocks, each with entries of its neighbours: what local attention looks at.

    Args:
        tensor: Has `dim`.
        dim: What is cut into equal blocks.
        into: The blocks, and the entries of one: its own, `before` of them in front, the rest behind; zeros beyond
            the ends. Lay the blocks out as `dim`: then each rank gets its neighbours' borders and nothing else.
        before: Entries in front of a block's own.

    Raises:
        ModelError: If the blocks do not divide the dimension, or have less than their own entries.

    Example:
        >>> import torch
        >>> from tulle import named as tn
        >>> length, blocks, window = tn.dims(length=4, blocks=2, window=3)
        >>> x = tn.from_torch(torch.tensor([1, 2, 3, 4]), length)
        >>> tn.halo(x, length, (blocks, window), before=1).local.tolist()
        [[0, 1, 2], [2, 3, 4]]
    """
    place, (blocks, window) = tensor.place(dim, "halo"), as_dims(into)
    own = dim.size // blocks.size
    after = window.size - own - before
    if dim.size % blocks.size or before < 0 or after < 0:
        raise ModelError(
            f"halo of {dim!r} by {blocks!r} with {before} before cannot give {window!r}: blocks must divide it, and "
            "hold at least their own entries"
        )
    scope = shared_scope([tensor], "halo")
    dims = (*tensor.dims[:place], blocks, window, *tensor.dims[place + 1 :])
    scope.axes(dims, "halo to")
    unmoved = [(other, other) for other in tensor.dims if other != dim]
    record("move", [tensor], tensor.dims, dims, ((dim, blocks), (None, window), *unmoved))
    label, splits = label_of("halo", dims), splits_of(scope, tensor.dims)
    mover = Mover(scope, tensor.local, label, splits)
    kept = fitting(scope, splits[place], blocks.size)
    part = mover.move([*splits[:place], kept, *splits[place + 1 :]])
    part = bordered(scope, part, kept, place, (before, after), label)
    mover.part = part.unfold(place, window.size, own).movedim(-1, place + 1)
    mover.splits[place : place + 1] = [kept, ()]
    return Tensor(*mover.laid_out_as(dims))


def bordered(scope: Scope, local: Local, axes: Axes, place: int, borders: tuple[int, int], label: str) -> Local:
    """A part with so many entries of its neighbours before and after its own, zeros beyond the ends.

    Args:
        scope: The mesh and layout.
        local: This rank's part.
        axes: Those that split the dimension along which neighbours border on it.
        place: Its place in the part.
        borders: How many entries before and after.
        label: What the exchange is counted under.
    """
    if axes:
        return scope.wire.halo(local, axes, place, *borders, label)
    return F.pad(local, [0, 0] * (local.dim() - 1 - place) + list(borders)) if any(borders) else local
