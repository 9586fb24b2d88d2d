"""`full_state_dict`: a model's state under plain PyTorch names and shapes, collected from the ranks block by block."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from tulle.checkpoint.placed import memory_of
from tulle.checkpoint.state import named_splits, versions_of, with_versions
from tulle.engine import engine_of
from tulle.tables.natural import block_rows_of, natural_order
from tulle.tables.split import Split


def full_state_dict(model: nn.Module, *, everywhere: bool = False) -> dict[str, Any]:
    """A model's state as one process would have it, on rank 0. Every rank of the model's mesh must call it.

    `torch.save` it, or give it to `load_state_dict` of the same model without tulle. Tables that are split come in
    blocks, so that a rank that does not get them needs no memory for them.

    Args:
        model: Distributed or plain.
        everywhere: Whether all ranks get it, not rank 0 alone.

    Returns:
        Copies in main memory by plain name, in whole shapes; two names of one tensor share one. Elsewhere nothing.

    Example:
        >>> import torch, tulle
        >>> model = torch.nn.Linear(2, 1)
        >>> {name: list(value.shape) for name, value in tulle.full_state_dict(model).items()}
        {'weight': [1, 2], 'bias': [1]}
    """
    engine = engine_of(model)
    is_destination = everywhere or engine is None or engine.axis.rank == 0
    own, splits = model.state_dict(), named_splits(model)
    copies: dict[object, Tensor] = {}
    state: dict[str, Any] = {}
    for name, value in own.items():
        if not isinstance(value, Tensor):
            state[name] = value
            continue
        key = memory_of(value) or name
        if key not in copies:
            copies[key] = _whole(value, splits.get(name), everywhere=everywhere, is_destination=is_destination)
        state[name] = copies[key]
    return with_versions(state, versions_of(own)) if is_destination else {}


def blocks_of_whole(part: Tensor, split: Split, *, everywhere: bool = False) -> Iterator[tuple[range, Tensor]]:
    """The rows of a split table, from the first to the last, at rank 0 or at all; empty blocks elsewhere.

    Every rank of the axis must take all blocks.

    Args:
        part: What this rank has.
        split: Of the table.
        everywhere: Whether all ranks get them.
    """
    order = natural_order(split)
    block_rows = block_rows_of(part.element_size() * split.width)
    for first in range(0, split.num_rows, block_rows):
        rows = range(first, min(first + block_rows, split.num_rows))
        wanted = [rows if everywhere or rank == 0 else range(0) for rank in range(split.axis.size)]
        yield rows, order.collect(part, wanted)


def _whole(value: Tensor, split: Split | None, *, everywhere: bool, is_destination: bool) -> Tensor:
    if split is None:
        return value.detach().to("cpu", copy=True) if is_destination else value
    whole = torch.empty(split.shape if is_destination else (0, split.width), dtype=value.dtype)
    for rows, block in blocks_of_whole(value, split, everywhere=everywhere):
        if is_destination:
            whole[rows.start : rows.stop] = block
    return whole
