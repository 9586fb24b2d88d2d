"""`splits`: what tensor parallelism would do to each piece of a model, by splitting a copy that has no memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import cast

import torch
import torch.distributed as dist
from torch import nn

from tulle.errors import ModelError
from tulle.mesh import Axis
from tulle.tensor_parallel.convert import SMALLEST_BYTES, known
from tulle.tensor_parallel.embedding import VocabularyEmbedding
from tulle.tensor_parallel.joined import joined
from tulle.tensor_parallel.known import Known
from tulle.tensor_parallel.linear import Column, RowLinear, RowTransposed
from tulle.tensor_parallel.placement import placements_of
from tulle.tensor_parallel.registry import factory_of, is_alone
from tulle.tensor_parallel.splitter import Splitter
from tulle.tensor_parallel.twin import misfit, without_memory
from tulle.workload import Split

_SUMMED = (RowLinear, RowTransposed, VocabularyEmbedding)
"""What such a module gives is summed over the ranks."""


def splits(
    model: nn.Module,
    names: Sequence[str],
    made_bytes: Mapping[str, int],
    taken_bytes: Mapping[str, int],
    *,
    ranks: int = 1,
) -> dict[str, Split]:
    """What splitting all that is registered over an axis `model` does to each piece of which it splits anything.

    Args:
        model: Stays as it is.
        names: Of the pieces.
        made_bytes: Of what each module returns, by name.
        taken_bytes: Of what each module is called with that has a gradient, by name.
        ranks: Of the axis, which then splits small layers too if there are no others; 1 if none is given.
    """
    twin = without_memory(model)
    nobody = cast("dist.ProcessGroup", None)  # cutting sends nothing
    size = ranks if ranks > 1 else 2
    axis = Axis("model", 0, size, tuple(range(size)), nobody, torch.device("meta"), 0.0)
    smallest_bytes = 0 if ranks > 1 and not known(model, ranks=ranks) else SMALLEST_BYTES
    _visit(twin, Splitter(axis), smallest_bytes, Known.of(twin), set())
    found = {name: _split(name, twin, made_bytes, taken_bytes) for name in names}
    return {name: split for name, split in found.items() if split is not None}


def _visit(module: nn.Module, to: Splitter, smallest_bytes: int, code: Known, seen: set[int]) -> None:
    """Split what is registered, and layers that follow each other; what cannot be split stays whole."""
    factory = factory_of(module)
    if id(module) in seen:
        return
    is_one = factory is not None and (is_alone(module) or misfit(module, factory, to.axis, to.name) is None)
    if factory is None or not is_one:
        near = joined(
            module,
            to.axis.size,
            lambda group: seen.isdisjoint(map(id, group.layers)) and code.allows(group, module, smallest_bytes),
        )
        if near is not None:
            near.split(to, lambda _: to.name)
            seen |= {*map(id, near.layers)}
        for child in module.children():
            _visit(child, to, smallest_bytes, code, seen)
    elif not is_alone(module) or max((one.nbytes for one in module.parameters()), default=0) >= smallest_bytes:
        with suppress(ModelError):
            factory(module, to)


def _split(piece: str, twin: nn.Module, made_bytes: Mapping[str, int], taken_bytes: Mapping[str, int]) -> Split | None:
    cut_bytes, whole_bytes, all_reduced_bytes, gathered_bytes, again_bytes = 0, 0, 0, 0, 0
    for path, module in twin.get_submodule(piece).named_modules(prefix=piece):
        placements = placements_of(module)
        for name, parameter in module.named_parameters(recurse=False):
            placement = placements.get(name)
            size_bytes = (placement.shape.numel() if placement else parameter.numel()) * parameter.element_size()
            cut_bytes += size_bytes if placement else 0
            whole_bytes += size_bytes
        if isinstance(module, _SUMMED) and placements:
            all_reduced_bytes += _of_call(path, made_bytes)
            again_bytes += 0 if isinstance(module, VocabularyEmbedding) else _of_call(path, made_bytes)
        elif isinstance(module, Column) and module.gathered is not None:
            gathered_bytes += _of_call(path, made_bytes)
            again_bytes += _of_call(path, taken_bytes)
    return Split(cut_bytes / whole_bytes, all_reduced_bytes, gathered_bytes, again_bytes) if cut_bytes else None


def _of_call(path: str, by_module: Mapping[str, int]) -> int:
    """What is told of a module, or else of the one that reads its weights without a call, as attention does."""
    while path and path not in by_module:
        path = path.rpartition(".")[0]
    return by_module.get(path, 0)
