"""Elementwise functions by name: activations, comparisons, selections, dropout, and tensors made of positions."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from tulle.errors import ModelError
from tulle.named.dims import Dim, as_dims, check_dim, check_once
from tulle.named.elementwise import Scalar
from tulle.named.placed import aligned, check_named, shared_scope
from tulle.named.randomness import next_key, uniform
from tulle.named.scope import current
from tulle.named.tensor import Tensor, elementwise


def relu(tensor: Tensor) -> Tensor:
    """`max(x, 0)`."""
    return tensor.map(torch.relu)


def gelu(tensor: Tensor, *, approximate: str = "none") -> Tensor:
    """The Gaussian error linear unit."""
    return tensor.map(partial(F.gelu, approximate=approximate))


def silu(tensor: Tensor) -> Tensor:
    """`x sigmoid(x)`."""
    return tensor.map(F.silu)


def sigmoid(tensor: Tensor) -> Tensor:
    """`1 / (1 + exp(-x))`."""
    return tensor.map(torch.sigmoid)


def tanh(tensor: Tensor) -> Tensor:
    """The hyperbolic tangent."""
    return tensor.map(torch.tanh)


def exp(tensor: Tensor) -> Tensor:
    """The exponential."""
    return tensor.map(torch.exp)


def log(tensor: Tensor) -> Tensor:
    """The natural logarithm."""
    return tensor.map(torch.log)


def sqrt(tensor: Tensor) -> Tensor:
    """The square root."""
    return tensor.map(torch.sqrt)


def rsqrt(tensor: Tensor) -> Tensor:
    """One over the square root."""
    return tensor.map(torch.rsqrt)


def square(tensor: Tensor) -> Tensor:
    """`x x`."""
    return tensor.map(torch.square)


def abs(tensor: Tensor) -> Tensor:
    """The absolute value."""
    return tensor.map(torch.abs)


def maximum(left: Tensor, right: Tensor | Scalar) -> Tensor:
    """The larger of two."""
    return elementwise(torch.maximum, left, _like(left, right))


def minimum(left: Tensor, right: Tensor | Scalar) -> Tensor:
    """The smaller of two."""
    return elementwise(torch.minimum, left, _like(left, right))


def equal(left: Tensor, right: Tensor | Scalar) -> Tensor:
    """Where the two are equal. `==` compares objects, as for anything that can be a key."""
    return elementwise(torch.eq, left, right)


def where(condition: Tensor, left: Tensor | Scalar, right: Tensor | Scalar) -> Tensor:
    """`left` where the condition holds, else `right`: a selection, so what is not selected may be NaN or infinite.

    Example:
        >>> import torch
        >>> from tulle import named as tn
        >>> d, = tn.dims(d=3)
        >>> x = tn.from_torch(torch.tensor([1.0, float("nan"), 3.0]), d)
        >>> tn.where(tn.equal(x, x), x, 0.0).local.tolist()
        [1.0, 0.0, 3.0]
    """
    return elementwise(torch.where, condition, left, right)


def dropout(tensor: Tensor, share: float) -> Tensor:
    """Set a share of the values to zero and scale the others up. What is dropped does not depend on the layout.

    Each call is a draw of its own, the same on every rank; `tn.manual_seed` begins them anew.

    Raises:
        ModelError: If the share is not from 0 to below 1.
    """
    if not 0 <= share < 1:
        raise ModelError(f"dropout was given the share {share!r}, expected a number from 0 to below 1")
    if share == 0:
        return tensor
    local = tensor.local
    kept = uniform(tensor.scope, tensor.dims, next_key(), device=local.device) >= share
    return tensor.with_part(local * kept * (1 / (1 - share)))


def range(dim: Dim, *, dtype: torch.dtype = torch.int64) -> Tensor:
    """The positions 0, 1, 2, ... along a dimension."""
    check_dim(dim)
    scope = current()
    scope.axes((dim,), "range")
    begin = scope.offset(dim)
    return Tensor(torch.arange(begin, begin + scope.local_size(dim), dtype=dtype, device=scope.device), (dim,))


def full(dims: Dim | Sequence[Dim], value: Scalar, *, dtype: torch.dtype | None = None) -> Tensor:
    """One value everywhere, under the layout in force; not trained."""
    scope, dims = current(), as_dims(dims)
    scope.axes(dims, "full")
    return Tensor(torch.full(scope.local_shape(dims), value, dtype=dtype, device=scope.device), dims)


def zeros(dims: Dim | Sequence[Dim], *, dtype: torch.dtype | None = None) -> Tensor:
    """Zeros, which are not trained: a parameter that begins as zeros is `param(..., std=0)`."""
    return full(dims, 0.0, dtype=dtype)


def mask(dim: Dim, length: int) -> Tensor:
    """Which entries of a dimension are real: those before `length`; the rest is padding."""
    return range(dim) < length


def one_hot(index: Tensor, dim: Dim, *, dtype: torch.dtype | None = None) -> Tensor:
    """1 along `dim` at each index, 0 elsewhere: `(*index.dims, dim)`. To look rows up use `tn.gather`.

    Raises:
        ModelError: If the index has that dimension itself.
    """
    check_named(index, "one_hot")
    check_once((*index.dims, *as_dims(dim)), "one_hot to")
    return elementwise(torch.eq, index, range(dim)).to(dtype or torch.get_default_dtype())


def causal_bias(length: Dim, memory: Dim, *, dtype: torch.dtype | None = None) -> Tensor:
    """0 where a memory position is not after the one that looks, else minus infinity: `(length, memory)`.

    Raises:
        ModelError: If the two are one dimension.
    """
    check_once((length, memory), "causal_bias of")
    after = elementwise(torch.lt, range(length), range(memory))
    values = torch.zeros((), dtype=dtype, device=after.device)
    return after.map(lambda later: torch.where(later, float("-inf"), values))


def stop_gradient(tensor: Tensor) -> Tensor:
    """The same numbers, through which no gradient flows back."""
    return tensor.detach()


def _like(tensor: Tensor, value: Tensor | Scalar) -> Any:
    """A number as a tensor beside another; a plain tensor as it is, to be refused."""
    if isinstance(value, Tensor | torch.Tensor):
        return value
    dtype = torch.result_type(torch.empty(1, dtype=tensor.dtype, device="meta"), value)
    return Tensor(torch.full((), value, dtype=dtype, device=tensor.device), ())


def broadcast_to(tensor: Tensor, dims: Dim | Sequence[Dim]) -> Tensor:
    """The tensor repeated along the dimensions that it lacks, in the order of `dims`. Its gradient is summed over them.

    Raises:
        ModelError: If `dims` lacks one of the tensor's.
    """
    dims = as_dims(dims)
    missing = [dim for dim in tensor.dims if dim not in dims]
    if missing:
        raise ModelError(f"broadcast_to {dims!r} lacks dimensions of the tensor, {missing!r}: name all of them")
    scope = shared_scope([tensor], "broadcast_to")
    split = scope.axes(dims, "broadcast_to")
    further = tuple(sorted(axis for axis in split if split[axis] not in tensor.dims))
    local = aligned(tensor.entered(further, "broadcast"), tensor.dims, dims)
    return Tensor(local.expand(scope.local_shape(dims)), dims)
