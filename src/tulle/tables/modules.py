"""`table_modules`: the modules of a model that look up in tables, and the parameter that is the table of each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn

TableModule = nn.Embedding | nn.EmbeddingBag


def table_of(module: nn.Module) -> nn.Parameter | None:
    """The parameter that a module looks up in; None if its weight is no parameter of its own.

    A weight that a parametrization computes is no table: to ask for it would compute it, and may change what it rests
    on (the vectors of a spectral norm). Nor is a buffer one.
    """
    return module._parameters.get("weight")


def table_modules(model: nn.Module) -> Iterator[tuple[str, TableModule, nn.Parameter]]:
    """Each module of a model that looks up in a table: its name, itself and the table, in the order of modules.

    Example:
        >>> model = nn.ModuleDict({"words": nn.Embedding(10, 4), "out": nn.Linear(4, 2)})
        >>> [(name, [*table.shape]) for name, _, table in table_modules(model)]
        [('words', [10, 4])]
    """
    for name, module in model.named_modules():
        if isinstance(module, TableModule) and (table := table_of(module)) is not None:
            yield name, module, table


def unwrapped(ids: Tensor) -> Tensor:
    """Ids as they are beneath the transforms of `torch.func` that a lookup is in: all of a batch, within `vmap`."""
    functorch = cast("Any", torch._C)._functorch
    while functorch.is_functorch_wrapped_tensor(ids):
        ids = functorch.get_unwrapped(ids)
    return ids
