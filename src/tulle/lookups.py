"""Says which row of which table a lookup asked for in vain, where torch says "index out of range in self"."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tulle.parts import unwrapped
from tulle.tables import TableModule, split_of, table_of


def explain_lookups(model: nn.Module, rank: int) -> None:
    """Have the error of each embedding name its table, the row, what was expected and the mend.

    The note is made when the error is there: a lookup that goes well costs a call and looks at no id. Tables that are
    split say it by themselves.
    """
    for name, module in model.named_modules():
        if isinstance(module, TableModule) and not _is_split(module):
            hook = partial(_explain, name or "(the model)", rank)
            module.register_forward_hook(hook, with_kwargs=True, always_call=True)


def _is_split(module: TableModule) -> bool:
    table = table_of(module)
    return table is not None and split_of(table) is not None


def _explain(
    name: str, rank: int, module: TableModule, arguments: tuple[Any, ...], keywords: dict[str, Any], _: object
) -> None:
    if torch.compiler.is_compiling():
        return
    error = sys.exc_info()[1]
    ids = arguments[0] if arguments else keywords.get("input")
    # Embedding raises the one, EmbeddingBag the other; after a GPU's assertion nothing can be looked at any more.
    if not isinstance(error, IndexError | RuntimeError) or not isinstance(ids, Tensor) or ids.device.type != "cpu":
        return
    ids = unwrapped(ids)
    outside = ids[(ids < 0) | (ids >= module.num_embeddings)]
    if outside.numel():
        error.add_note(
            f"tulle: the table {name!r} was asked for row {int(outside[0])} on rank {rank}, expected rows "
            f"0..{module.num_embeddings - 1}: check the vocabulary that made the ids, or make the table larger"
        )
