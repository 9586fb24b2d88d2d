"""What who has nothing of a parameter is told, or sent, of it: the shape of the whole, and the whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from tulle.errors import ModelError
from tulle.parts.reductions import Together
from tulle.parts.wholes import KINDS, PART_OF, Whole, extent_of_whole, shape_of_whole

_SHAPE = "_tulle_shape_of_whole"
"""The attribute by which a parameter that lives elsewhere knows how large all of it is."""


def tell_shape(parameter: Tensor, shape: Sequence[int]) -> None:
    """Note of a parameter that lives at another stage, of which ranks there have parts, what the shape of all is."""
    setattr(parameter, _SHAPE, tuple(shape))


def shape_told(tensor: Tensor) -> tuple[int, ...]:
    """A tensor's shape as its program is told it: of what a rank has a part of that of the whole, where it is known.

    Every rank that has a part must ask: of several flat ones in one tensor the numbers are counted.
    """
    if type(tensor) not in KINDS:
        return getattr(tensor, _SHAPE, None) or tuple(tensor.shape)
    told, whole = shape_of_whole(tensor), cast("Whole", getattr(tensor, PART_OF))
    with torch._C.DisableTorchFunctionSubclass():
        if told is None and tensor.dim() == 1 and extent_of_whole(whole).is_known:
            return (round(Together(whole.over, whole.count).numbers(tensor)),)
        return tuple(tensor.shape) if told is None else told


def whole_of_values(tensor: Tensor, taker: str) -> Tensor:
    """A tensor as it is for who takes it for all; of a part the whole. Every rank that has a part must call it.

    Args:
        tensor: Any.
        taker: Who takes it, for errors.

    Raises:
        ModelError: If nobody can put it together, or it wants a gradient that none has.
    """
    if type(tensor) not in KINDS:
        return tensor
    whole: Whole = getattr(tensor, PART_OF)
    with torch._C.DisableTorchFunctionSubclass():
        found = whole.gather(tensor)
    if found is None:
        raise ModelError(whole.refusal(taker))
    return found
