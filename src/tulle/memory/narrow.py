"""`compute_in`: a model whose parameters are narrow takes and gives what it did before."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only


def compute_in(model: nn.Module, dtype: torch.dtype) -> None:
    """Have a model cast its floating-point arguments to a dtype, and its results back to float32.

    For `shard_optimizer(..., narrow=dtype)`, which narrows the parameters. Norms and losses that must be wide stay the
    model's own affair; what leaves the outermost module is wide again, so a loss outside of it is.

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

    def narrowed(value: Tensor) -> Tensor:
        return value.to(dtype) if value.is_floating_point() else value

    def widened(value: Tensor) -> Tensor:
        return value.float() if value.dtype == dtype else value

    def before(_: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[Any, Any]:
        return tree_map_only(Tensor, narrowed, (arguments, keywords))

    def after(_module: nn.Module, _arguments: object, output: Any) -> Any:
        return tree_map_only(Tensor, widened, output)

    model.register_forward_pre_hook(before, with_kwargs=True)
    model.register_forward_hook(after)
