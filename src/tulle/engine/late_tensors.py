"""Late tensors: parameters and gradients whose values are still on the way; whoever looks at one waits for it first.

A tensor becomes late, and plain again, by a change of its class, so that it stays the object that a module, an
optimizer or a user holds. While nothing is late nothing is paid. Every function of torch in Python goes through
`__torch_function__`; scripted modules and extensions that take tensors past it do not, nor does what `torch.compile`
made, which is refused while it is made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._guards import CompileContext
from torch.utils._pytree import tree_leaves

from tulle.errors import PlanError
from tulle.parts import OF_NO_VALUES, Part, taken_together
from tulle.tables import ShardGradient

COMPILED = (
    "torch.compile was given a model, or an optimizer, whose plan has updates wait until parameters are read, which "
    "compiled code does unseen: give tulle.distribute the plan with schedule='step'"
)


class _Late:
    """What late parameters and gradients share."""

    __slots__ = ()
    plain: type[Tensor]
    """The class of the tensor when its values are there."""
    complete: Callable[[Tensor], None]
    """Waits for the values and makes this tensor, which it is given, and those that come with it, plain."""

    def make_true(self: Any) -> None:
        """Wait for the values."""
        self.complete(self)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Make all late arguments true; then the function sees plain tensors.

        Raises:
            PlanError: Within `torch.compile`.
        """
        keywords = kwargs or {}
        if func in OF_NO_VALUES:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **keywords)
        if CompileContext.current_compile_id() is not None:
            raise PlanError(COMPILED)
        for tensor in tree_leaves((args, keywords)):
            if isinstance(tensor, _Late):
                tensor.make_true()
        return func(*args, **keywords)


@taken_together
class LateGradient(_Late, torch.Tensor):
    """A gradient of which the sum over the ranks is on the way."""

    plain = torch.Tensor


@taken_together
class LateShardGradient(_Late, ShardGradient):
    """The same of a rank's part of a table: rows are on the way."""

    plain = ShardGradient


class LateParameter(_Late, nn.Parameter):
    """A parameter whose update waits for its gradient."""

    plain = nn.Parameter

    # These two look at the class before the values; then it is that of the true parameter.
    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy of the true parameter."""
        self.make_true()
        return self.__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A pickle of the true parameter."""
        self.make_true()
        return self.__reduce_ex__(protocol)


class LatePart(LateParameter, Part):
    """A parameter of which this rank has a part, whose update waits until it is read."""

    plain = Part


_KINDS = {kind.plain: kind for kind in (LateGradient, LateShardGradient, LateParameter, LatePart)}


def is_late(tensor: Tensor | None) -> bool:
    """Whether a tensor's values are on the way."""
    return isinstance(tensor, _Late)


def make_late(tensor: Tensor, complete: Callable[[Tensor], None]) -> None:
    """Have the next look at a plain tensor call `complete` with it, which must make it plain."""
    assert type(tensor) in _KINDS, "only plain tensors become late"
    tensor.__class__ = _KINDS[type(tensor)]
    vars(tensor)["complete"] = complete


def make_plain(tensor: Tensor) -> None:
    """The values are there; of a tensor that is not late nothing changes."""
    if isinstance(tensor, _Late):
        object.__setattr__(tensor, "__class__", tensor.plain)
        del vars(tensor)["complete"]
