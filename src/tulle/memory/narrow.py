"""`compute_in`: a model whose parameters are narrow takes and gives what it did before."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only


def compute_in(model: nn.Module, dtype: torch.dtype) -> None:
    """Have a model cast its floating-point arguments to a dtype, and its results back to float32.

    For `shard_optimizer(..., narrow=dtype)`, which narrows the parameters. Buffers stay wide, and so do tables that are
    kept in step in a way of their own; each module that has parameters is given what they are. Norms and losses that
    must be wide stay the model's own affair; what leaves the outermost module is wide again, as is a loss of that.

    Args:
        model: The outermost module.
        dtype: Of its parameters.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(2, 2).bfloat16()
        >>> compute_in(model, torch.bfloat16)
        >>> model(torch.ones(1, 2)).dtype
        torch.float32
    """
    for module in model.modules():
        module.register_forward_pre_hook(partial(_narrow, dtype if module is model else None), with_kwargs=True)
    model.register_forward_hook(partial(_widen, dtype))


# Functions of the module, not of a call: a model that is pickled takes its hooks along.
def _narrow(
    dtype: torch.dtype | None, module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]
) -> tuple[Any, Any] | None:
    """Give a module what its parameters are, or a dtype if it has none."""
    own = (p.dtype for p in module._parameters.values() if p is not None and p.is_floating_point())
    wanted = next(own, dtype)
    return None if wanted is None else _cast((arguments, keywords), wanted)


def _widen(dtype: torch.dtype, _module: nn.Module, _arguments: object, output: Any) -> Any:
    return tree_map_only(Tensor, lambda value: value.float() if value.dtype == dtype else value, output)


def _cast(given: Any, dtype: torch.dtype) -> Any:
    """With floating-point tensors in a dtype; None if all are, so that containers stay the objects that they are."""

    def is_other(value: object) -> bool:
        return isinstance(value, Tensor) and value.is_floating_point() and value.dtype != dtype

    if not any(map(is_other, tree_leaves(given))):
        return None
    return tree_map(lambda value: value.to(dtype) if is_other(value) else value, given)
