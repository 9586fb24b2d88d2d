"""Parts are lent, as plain tensors, to code that knows that they are parts: the steps of optimizers, say."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn
from torch.optim import Optimizer

from tulle.parts.guards import GuardedData, PartData, PartValues
from tulle.parts.part import Part

_PLAIN = {Part: nn.Parameter, PartValues: Tensor, PartData: Tensor, GuardedData: Tensor}
"""By class of what may be lent, what it is then."""


def guard_again(parts: Iterable[nn.Parameter], optimizer: Optimizer | None = None, *_: object) -> None:
    """Guard those that `lift` made plain for a step of an optimizer; what its state keeps of the others is plain."""
    for part in parts:
        if type(part) is nn.Parameter:
            object.__setattr__(part, "__class__", Part)
        elif optimizer is not None:  # it was one in the step, too
            keep_plainly(optimizer, part)


def keep_plainly(optimizer: Optimizer, part: nn.Parameter) -> None:
    """Have what an optimizer's state keeps of a part be plain, for good."""
    kept = optimizer.state.get(part, {}).values()
    for lifted in lift(value for value in kept if isinstance(value, Tensor)):
        vars(lifted[0]).clear()


def lift(tensors: Iterable[Tensor | None]) -> list[tuple[Tensor, type[Tensor]]]:
    """Have those that are guarded be plain, for code that knows that they are parts; give them, for `lower`."""
    lifted = [(one, type(one)) for one in tensors if one is not None and type(one) in _PLAIN]
    for part, kind in lifted:
        object.__setattr__(part, "__class__", _PLAIN[kind])
    return lifted


def lower(lifted: Iterable[tuple[Tensor, type[Tensor]]]) -> None:
    """Guard again what `lift` gave."""
    for part, kind in lifted:
        if type(part) is _PLAIN[kind]:
            object.__setattr__(part, "__class__", kind)
