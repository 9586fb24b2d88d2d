"""`give`: a tensor gets values and stays the object that it is; `swappable`: a model whose tensors can get others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


def give(tensor: Tensor, values: Tensor) -> None:
    """Give a parameter or buffer on device meta its values, of any shape: it stays the object that it is.

    Example:
        >>> import torch
        >>> weight = torch.nn.Parameter(torch.empty(2, device="meta"))
        >>> give(weight, torch.ones(3))
        >>> weight
        Parameter containing:
        tensor([1., 1., 1.], requires_grad=True)
    """
    made = torch.Tensor._make_subclass(type(tensor), values.detach(), tensor.requires_grad)
    vars(made).update(vars(tensor))
    torch.utils.swap_tensors(tensor, made)


@contextmanager
def swappable(model: nn.Module) -> Iterator[None]:
    """Have nothing refer to a model's tensors: recurrent modules keep weak references, which `swap_tensors` refuses."""
    recurrent = [module for module in model.modules() if isinstance(module, nn.RNNBase)]
    for module in recurrent:
        module._flat_weight_refs = []
    try:
        yield
    finally:
        for module in recurrent:
            module._init_flat_weights()
