"""The edges of the language: plain tensors come in as named ones, and go out whole."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tulle.errors import ModelError
from tulle.named.dims import Dim, as_dims, spelled
from tulle.named.gradients import PlainLeaf
from tulle.named.placed import Placed
from tulle.named.scope import current
from tulle.named.tensor import Tensor


def from_torch(tensor: torch.Tensor, dims: Dim | Sequence[Dim]) -> Tensor:
    """This rank's part of a plain tensor that every rank has whole. Gradients flow back to it, whole on every rank.

    Args:
        tensor: Of the sizes of `dims`, equal on all ranks.
        dims: Its dimensions, in order.

    Raises:
        ModelError: If the shape is not that of the dimensions.
        PlanError: If the layout splits two of them over one axis, or one does not divide evenly.
    """
    dims = as_dims(dims)
    if not isinstance(tensor, torch.Tensor):
        raise ModelError(f"from_torch was given {type(tensor).__name__}, expected a plain tensor, then its dimensions")
    if tuple(tensor.shape) != tuple(dim.size for dim in dims):
        raise ModelError(
            f"from_torch was given a tensor of shape {tuple(tensor.shape)} for dimensions {spelled(dims)}: "
            "name each dimension of the tensor, in order and with its size"
        )
    scope = current()
    split = scope.axes(dims, "from_torch of")
    if isinstance(tensor, torch.nn.Parameter):  # others may use it too: there is one sum for all
        tensor = PlainLeaf.of(tensor, scope.gradients).entered((), "from_torch")
    if scope.is_on_paper:
        tensor = tensor.to("meta")
    for axis, dim in split.items():
        tensor = scope.wire.scatter(tensor, axis, dims.index(dim), f"from_torch {dim.name}")
    return Tensor(tensor, dims)


def from_local(local: torch.Tensor, dims: Dim | Sequence[Dim]) -> Tensor:
    """A named tensor of which this rank already has its part, as when each rank loads its own samples.

    Raises:
        ModelError: If the part's shape is not that of this rank's part.
    """
    dims = as_dims(dims)
    scope = current()
    scope.axes(dims, "from_local of")
    if tuple(local.shape) != scope.local_shape(dims):
        raise ModelError(
            f"from_local was given a part of shape {tuple(local.shape)} of dimensions {spelled(dims)}, expected "
            f"{scope.local_shape(dims)} under {scope!r}"
        )
    return Tensor(local.to("meta") if scope.is_on_paper else local, dims)


def to_torch(tensor: Placed) -> torch.Tensor:
    """The whole tensor on every rank, its dimensions in the order of `tensor.dims`. Every rank must call it.

    Gradients flow back: every rank's gradient of the whole must be the same.

    Raises:
        ModelError: If it has no named dimensions.
    """
    if not isinstance(tensor, Placed):
        raise ModelError(f"to_torch was given a {type(tensor).__name__}, expected a tensor of named dimensions")
    whole = tensor.local
    for place, dim in enumerate(tensor.dims):
        for axis in reversed(tensor.scope.axes_of(dim)):
            whole = tensor.scope.wire.gather(whole, axis, place, f"to_torch {dim.name}")
    return whole
