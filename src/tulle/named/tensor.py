"""`Tensor`: the arithmetic of named dimensions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from tulle.errors import ModelError
from tulle.named.contraction import contract, multiply
from tulle.named.dims import Dim, as_dims, spelled
from tulle.named.elementwise import Scalar, broadcast
from tulle.named.placed import Local, Placed
from tulle.named.relayout import renamed
from tulle.named.scope import current
from tulle.named.summation import Over, averaged, summed


class Tensor(Placed):
    """This rank's part of a tensor whose dimensions have names, in any order. Made by `from_torch` and by operations.

    What it computes is the same in every layout; where sums and exchanges are needed, they happen inside. All ranks
    must do the same operations in the same order.

    Example:
        >>> import torch
        >>> from tulle import named as tn
        >>> batch, d = tn.dims(batch=2, d=3)
        >>> x, gain = tn.from_torch(torch.ones(2, 3), (batch, d)), tn.from_torch(torch.arange(3.0), (d,))
        >>> tn.to_torch(x * gain + 1).tolist()
        [[1.0, 2.0, 3.0], [1.0, 2.0, 3.0]]
    """

    __slots__ = ()

    @property
    def grad(self) -> Tensor | None:
        """The gradient of a parameter or of another leaf, laid out as the tensor is."""
        gradient = self.part.grad
        return None if gradient is None else Tensor(gradient, self.dims, (), self.scope)

    def map(self, function: Callable[[Local], Local]) -> Tensor:
        """Apply an elementwise function of plain tensors.

        Raises:
            ModelError: If it gives another shape, and so is not elementwise.
        """
        local = self.local
        result = function(local)
        if result.shape != local.shape:
            raise ModelError(
                f"map was given a function that makes shape {tuple(result.shape)} of {tuple(local.shape)}: one that "
                "treats each number by itself leaves the shape as it is; sums and reshapes are in tulle.named"
            )
        return Tensor(result, self.dims, (), self.scope)

    def with_part(self, part: Local) -> Tensor:
        """Another part of the same dimensions."""
        return Tensor(part, self.dims, (), self.scope)

    def item(self) -> float:
        """The number that a tensor without dimensions holds. Every rank must call it.

        Raises:
            ModelError: If the tensor has dimensions.
        """
        if self.dims:
            raise ModelError(f"item, or a truth value, was asked of {self!r}, which has dimensions: reduce them first")
        return self.local.item()

    def __bool__(self) -> bool:
        return bool(self.item())

    def __float__(self) -> float:
        return float(self.item())

    if not TYPE_CHECKING:  # which would take any attribute to be there

        def __getattr__(self, name: str) -> Any:
            """What plain tensors have and named ones do not is told where it is.

            Raises:
                AttributeError: Always.
            """
            raise AttributeError(
                f"a named tensor has no attribute {name!r}: functions of it are in tulle.named, tn.softmax(x, d) say, "
                "its dimensions are x.dims, and tn.to_torch(x) is a plain tensor"
            )

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse to be taken for a plain tensor.

        Raises:
            ModelError: Always.
        """
        name = getattr(function, "__name__", str(function))
        raise ModelError(
            f"torch's {name} was given a named tensor: use that of tulle.named, or, where it treats each number by "
            f"itself, tn.elementwise(torch.{name}, ...); a plain tensor beside it is named with tn.from_torch"
        )

    def detach(self) -> Tensor:
        """The same numbers, through which no gradient flows back."""
        return Tensor(self.local.detach(), self.dims, (), self.scope)

    def to(self, dtype: torch.dtype) -> Tensor:
        """The numbers in another dtype."""
        return self if self.dtype == dtype else self.map(lambda local: local.to(dtype))

    def backward(self) -> None:
        """Compute gradients, as `torch.Tensor.backward`. Every rank must call it.

        Raises:
            ModelError: If the tensor has dimensions.
        """
        if self.dims:
            raise ModelError(
                f"backward was called on a tensor with dimensions {spelled(self.dims)}: call it on a number, such as "
                "its mean()"
            )
        self.local.backward()

    def dot(self, other: Tensor, over: Dim | Sequence[Dim]) -> Tensor:
        """Multiply and sum over some dimensions; those that remain keep their order, `other`'s come last.

        Raises:
            ModelError: If one of the two does not have a dimension that is summed over.

        Example:
            >>> import torch
            >>> from tulle import named as tn
            >>> batch, d, ff = tn.dims(batch=2, d=3, ff=4)
            >>> x, w = tn.from_torch(torch.ones(2, 3), (batch, d)), tn.from_torch(torch.ones(3, 4), (d, ff))
            >>> x.dot(w, d)
            Tensor(batch=2, ff=4; float32)
        """
        return Tensor(*multiply(self, other, over), self.scope)

    def sum(self, over: Over = None) -> Tensor:
        """Sum over some dimensions, by default all; `tn.sum` is the same."""
        return Tensor(*summed(self, over), self.scope)

    def mean(self, over: Over = None) -> Tensor:
        """Mean over some dimensions, by default all; `tn.mean` is the same."""
        return Tensor(*averaged(self, over), self.scope)

    def rename(self, **dims: Dim) -> Tensor:
        """Give dimensions other names of the same size; data moves if the layout splits the new ones otherwise.

        Raises:
            ModelError: If a dimension is not there, or a size differs.
            PlanError: If the result is not legal in the layout.

        Example:
            >>> import torch
            >>> from tulle import named as tn
            >>> length, memory = tn.dims(length=4, memory=4)
            >>> tn.from_torch(torch.ones(4), (length,)).rename(length=memory)
            Tensor(memory=4; float32)
        """
        result = Tensor(*renamed(self, dims))
        result.enter_as(self)
        return result

    def __add__(self, other: Tensor | Scalar) -> Tensor:
        return _added(torch.add, self, other)

    def __sub__(self, other: Tensor | Scalar) -> Tensor:
        return _added(torch.sub, self, other)

    def __mul__(self, other: Tensor | Scalar) -> Tensor:
        return _alike(torch.mul, self, other) if isinstance(other, Tensor) else _scaled(torch.mul, self, other)

    def __truediv__(self, other: Tensor | Scalar) -> Tensor:
        return _alike(torch.div, self, other) if isinstance(other, Tensor) else _scaled(torch.div, self, other)

    def __radd__(self, other: Scalar) -> Tensor:
        return self + other

    def __rsub__(self, other: Scalar) -> Tensor:
        return self.map(lambda local: other - local)

    def __rmul__(self, other: Scalar) -> Tensor:
        return _scaled(torch.mul, self, other)

    def __rtruediv__(self, other: Scalar) -> Tensor:
        return self.map(lambda local: other / local)

    def __matmul__(self, other: object) -> Tensor:
        """Refuse: by position nobody could tell over what to sum.

        Raises:
            ModelError: Always.
        """
        raise ModelError(
            f"@ was asked of {self!r} and {other!r}, and sums over the dimensions that happen to be last: say over "
            "which, x.dot(w, d), or what remains, tn.einsum(x, w, out=(batch, length))"
        )

    __rmatmul__ = __matmul__

    def __mod__(self, other: Tensor | Scalar) -> Tensor:
        return _beside(torch.remainder, self, other)

    def __floordiv__(self, other: Tensor | Scalar) -> Tensor:
        return _beside(torch.floor_divide, self, other)

    def __neg__(self) -> Tensor:
        return _scaled(torch.mul, self, -1)

    def __pow__(self, exponent: Scalar) -> Tensor:
        return self.map(lambda local: local**exponent)

    def __lt__(self, other: Tensor | Scalar) -> Tensor:
        return _beside(torch.lt, self, other)

    def __le__(self, other: Tensor | Scalar) -> Tensor:
        return _beside(torch.le, self, other)

    def __gt__(self, other: Tensor | Scalar) -> Tensor:
        return _beside(torch.gt, self, other)

    def __ge__(self, other: Tensor | Scalar) -> Tensor:
        return _beside(torch.ge, self, other)

    def __and__(self, other: Tensor) -> Tensor:
        return _beside(torch.logical_and, self, other)

    def __or__(self, other: Tensor) -> Tensor:
        return _beside(torch.logical_or, self, other)

    def __invert__(self) -> Tensor:
        return self.map(torch.logical_not)


def elementwise(function: Callable[..., Local], *inputs: Tensor | Scalar, **options: Any) -> Tensor:
    """Apply an elementwise function of plain tensors to named ones and numbers, broadcast by name.

    The result's dimensions are those of the input that has most, then what others add.

    Raises:
        PlanError: If the operation is not legal in the layout.
        ModelError: If one dimension name comes with two sizes, or an input lives under another layout.

    Example:
        >>> import torch
        >>> from tulle import named as tn
        >>> batch, d = tn.dims(batch=2, d=3)
        >>> x = tn.from_torch(torch.ones(2, 3), (batch, d))
        >>> tn.elementwise(torch.maximum, x, tn.from_torch(torch.ones(3), (d,)))
        Tensor(batch=2, d=3; float32)
    """
    return Tensor(*broadcast(function, inputs, **options))


def einsum(*inputs: Tensor, out: Dim | Sequence[Dim]) -> Tensor:
    """Multiply any number of tensors, and sum over the dimensions that `out` leaves away.

    Raises:
        PlanError: If two dimensions of the operation are split over one axis.
        ModelError: If one dimension name comes with two sizes, or `out` has what no input has.

    Example:
        >>> import torch
        >>> from tulle import named as tn
        >>> batch, length = tn.dims(batch=2, length=3)
        >>> x = tn.from_torch(torch.ones(2, 3), (batch, length))
        >>> tn.to_torch(tn.einsum(x, x, out=batch)).tolist()
        [3.0, 3.0]
    """
    return Tensor(*contract(inputs, as_dims(out)))


def _added(function: Callable[..., Local], left: Tensor, right: Tensor | Scalar) -> Tensor:
    """Two sums that are pending over the same axes stay so, as one."""
    if (
        isinstance(right, Tensor)
        and left.pending
        and (left.pending, left.dims, left.scope) == (right.pending, right.dims, right.scope)
    ):
        return Tensor(function(left.part, right.part), left.dims, left.pending, left.scope)
    return _beside(function, left, right)


def _beside(function: Callable[..., Local], left: Tensor, right: Tensor | Scalar) -> Tensor:
    """The short way for a number; `elementwise` refuses what is neither."""
    if isinstance(right, Tensor):
        return _alike(function, left, right)
    if isinstance(right, torch.Tensor):
        return elementwise(function, left, right)
    return Tensor(function(left.local, right), left.dims, (), left.scope)


def _alike(function: Callable[..., Local], left: Tensor, right: Tensor) -> Tensor:
    """The short ways for two tensors: of the same dimensions, which enter as they are; or that have met before."""
    scope = left.scope
    if scope is right.scope and scope is current() and scope.trace is None:
        if left.dims == right.dims:
            return Tensor(function(left.local, right.local), left.dims, (), scope)
        plan = scope.plans.get((function.__name__, left.dims, right.dims))
        if plan is not None:
            return Tensor(function(plan.entered(0, left), plan.entered(1, right)), plan.dims, (), scope)
    return Tensor(*broadcast(function, (left, right)))


def _scaled(function: Callable[..., Local], tensor: Tensor, factor: Scalar) -> Tensor:
    if isinstance(factor, torch.Tensor):
        return elementwise(function, tensor, factor)  # which refuses it
    return Tensor(function(tensor.part, factor), tensor.dims, tensor.pending, tensor.scope)
