"""`table_modules`: the modules of a model that look up in tables, the parameter that is the table of each, and how."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor, nn

TableModule = nn.Embedding | nn.EmbeddingBag


class Lookup(NamedTuple):
    """How rows of a table are looked up: the options of `nn.Embedding` and `nn.EmbeddingBag` that bear on rows.

    Args:
        table: The parameter.
        padding_idx: The row that gets no gradient, counted from the first.
        max_norm: Rows of a larger norm are renormalized.
        norm_type: Of which norm.
        scale_grad_by_freq: Whether the gradient of a row is divided by how often it is looked up.
    """

    table: Tensor
    padding_idx: int | None = None
    max_norm: float | None = None
    norm_type: float = 2.0
    scale_grad_by_freq: bool = False

    @staticmethod
    def of(module: TableModule) -> Lookup:
        """Of a module."""
        table = table_of(module)
        table = module.weight if table is None else table
        return Lookup(table, module.padding_idx, module.max_norm, module.norm_type, module.scale_grad_by_freq)

    @property
    def goes_alone(self) -> bool:
        """Whether rows must be fetched for it alone, when it comes: it writes them, or counts who looks them up."""
        return bool(self.max_norm) or self.scale_grad_by_freq


def has_own_forward(module: TableModule) -> bool:
    """Whether a class derives from one of torch's and looks up, or reads its table, in a way of its own."""
    plain = nn.Embedding if isinstance(module, nn.Embedding) else nn.EmbeddingBag
    return type(module).forward is not plain.forward


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
