"""Measures what a plan rests on: which tables a model has, and how many of their rows one batch touches."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from tulle.pipeline.written import written_back

TableModule = nn.Embedding | nn.EmbeddingBag


def trained_tables(model: nn.Module) -> dict[str, TableModule]:
    """The embeddings that are trained, by the name of their parameter; a shared one once."""
    names = {id(parameter): name for name, parameter in model.named_parameters() if parameter.requires_grad}
    found: dict[str, TableModule] = {}
    for module in model.modules():
        if isinstance(module, TableModule) and id(module.weight) in names:
            found.setdefault(names[id(module.weight)], module)
    return found


def sparse_tables(model: nn.Module) -> dict[str, TableModule]:
    """Those of them with `sparse=True`."""
    return {name: module for name, module in trained_tables(model).items() if module.sparse}


def call(model: nn.Module, sample: object) -> object:
    """Call a model with one batch: a mapping as keywords, a tuple as positional arguments, anything else as the one."""
    if isinstance(sample, Mapping):
        return model(**sample)
    if isinstance(sample, tuple):
        return model(*sample)
    return model(sample)


@dataclass(frozen=True, slots=True)
class Lookups:
    """What one batch looks up in one table.

    Args:
        rows: Distinct row numbers, ascending.
        tokens: Lookups, repeats counted.
    """

    rows: Tensor
    tokens: int


def rows_touched(model: nn.Module, sample: object) -> dict[str, Tensor]:
    """Distinct rows that one batch looks up in each trained table, ascending, by parameter name.

    Runs one forward without gradients and leaves no trace: random states, buffers and rows are as before.
    """
    return {name: lookups.rows for name, lookups in looked_up(model, sample).items()}


def looked_up(model: nn.Module, sample: object) -> dict[str, Lookups]:
    """What one batch looks up in each trained table, by parameter name; leaves no trace, as `rows_touched`."""
    tables = trained_tables(model)
    seen: dict[int, list[Tensor]] = {id(module.weight): [] for module in tables.values()}
    with torch.no_grad(), untouched(model), written_back(model), _Watch(seen):
        call(model, sample)
    found = {
        name: torch.cat([module.weight.new_empty(0, dtype=torch.long), *seen[id(module.weight)]])
        for name, module in tables.items()
    }
    return {name: Lookups(torch.unique(ids), len(ids)) for name, ids in found.items()}


class _Watch(TorchFunctionMode):
    """Notes the ids of each lookup where it is made: a table's own `forward` may be given something else than ids.

    Args:
        seen: Where to put them, by the identity of the table.
    """

    def __init__(self, seen: Mapping[int, list[Tensor]]) -> None:
        super().__init__()
        self._seen = seen

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Look at lookups, and let everything through."""
        if func is functional.embedding or func is functional.embedding_bag:
            given = inspect.signature(func).bind(*args, **(kwargs or {})).arguments
            if (noted := self._seen.get(id(given["weight"]))) is not None:
                ids = given["input"].reshape(-1).long()
                padding = given.get("padding_idx")
                noted.append(ids if padding is None else ids[ids != padding % len(given["weight"])])
        return func(*args, **(kwargs or {}))


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Put back random states, buffers and `max_norm` afterwards; without `max_norm` a lookup changes no row."""
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    buffers = [
        (module, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    python_state = random.getstate()
    bounded = [(m, m.max_norm) for m in model.modules() if isinstance(m, TableModule) and m.max_norm is not None]
    for module, _ in bounded:
        module.max_norm = None
    with torch.random.fork_rng(devices=list(devices)):
        try:
            yield
        finally:
            random.setstate(python_state)
            for module, name, buffer, value in buffers:
                buffer.copy_(value)
                module._buffers[name] = buffer  # forward may have put another in its place
            for module, max_norm in bounded:
                module.max_norm = max_norm
