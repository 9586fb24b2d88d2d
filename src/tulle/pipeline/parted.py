"""Parameters of which a rank has a part, between modules: other stages are told the shape of the whole, and sent that.

    stage 0, two replicas that share a table out          stage 1
    part of words.weight ──┐
                           ├─ gathered ─ words.weight ──▶ hidden @ words.weight.T
    part of words.weight ──┘

What runs where the parameter lives is given the part, which knows what it is a part of.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tulle.parts import COUNTS, JOINED, SHAPES, whole_of_values
from tulle.pipeline.interception import interception_aside
from tulle.pipeline.placeholder import Placeholder, running

_SHAPES = COUNTS | SHAPES
UNTOLD: Any = object()
"""What `told_of_shape` gives for what asks for something else."""


def whole_of(tensor: Tensor, taker: str) -> Tensor:
    """A tensor as other stages are to have it: of a part the whole. Every rank that has a part must call it.

    Args:
        tensor: This rank's.
        taker: For what it leaves, for errors.

    Raises:
        ModelError: If nobody can put it together, or it wants a gradient that none has.
    """
    if type(tensor) is Tensor:
        return tensor
    token = running.set(None)  # gathering is no operation of the program
    try:
        with interception_aside():
            return whole_of_values(tensor, taker)
    finally:
        running.reset(token)


def wholes_to_join(name: str, natives: list[Any]) -> list[Any]:
    """What an operation is given at its stage: what joins tensors has wholes, as those that came from other stages are.

    Args:
        name: Of the operation.
        natives: Leaves of its arguments.
    """
    if name not in JOINED:
        return natives
    return [whole_of(one, name) if isinstance(one, Tensor) else one for one in natives]


def told_of_shape(function: Callable[..., Any], args: Sequence[Any], leaves: Sequence[Any]) -> Any:
    """What a function that asks for a shape gives of a placeholder, alike on all ranks; else `UNTOLD`.

    Args:
        function: Of torch.
        args: It is called with.
        leaves: Of these, with placeholders.
    """
    if function not in _SHAPES or not args or not isinstance(leaves[0], Placeholder):
        return UNTOLD
    with torch._C.DisableTorchFunctionSubclass():
        return function(leaves[0], *args[1:])
