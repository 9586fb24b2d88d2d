"""Embeddings whose table is split: the user's modules, with a forward that fetches rows from their owners."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NoReturn, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from tulle.comm import eager
from tulle.derived import derived
from tulle.engine.split_tables import SplitTables
from tulle.errors import ModelError
from tulle.tables import TableModule, split_of
from tulle.torch_functions import is_transformed

_RUN_TIME = "_tulle_split_tables"
_autograd: Any = vars(torch._C)["_autograd"]


class _Parted:
    """A module that cannot be copied: a copy would hold a part of a table and no way to the rest."""

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise _no_copy()

    def _replicate_for_data_parallel(self) -> NoReturn:
        raise _no_copy()


class SplitEmbedding(_Parted, nn.Embedding):
    """`nn.Embedding` of which this rank holds a part; `num_embeddings` and `embedding_dim` are those of the whole."""

    def forward(self, input: Tensor) -> Tensor:
        """Look up. Every rank must call it, each with its own ids."""
        return _look_up(self, input, F.embedding)


class SplitEmbeddingBag(_Parted, nn.EmbeddingBag):
    """`nn.EmbeddingBag` of which this rank holds a part."""

    def forward(self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        """Look up and pool. Every rank must call it, each with its own ids."""
        pool = partial(
            F.embedding_bag,
            offsets=offsets,
            mode=self.mode,
            per_sample_weights=per_sample_weights,
            include_last_offset=self.include_last_offset,
        )
        return _look_up(self, input, pool)


_SPLIT_KINDS: Mapping[type, type] = {nn.Embedding: SplitEmbedding, nn.EmbeddingBag: SplitEmbeddingBag}


def adopt(module: TableModule, tables: SplitTables) -> None:
    """Have a module look up in a split table: its class becomes one that derives from its own."""
    plain = type(module)
    kind = _SPLIT_KINDS[nn.Embedding if isinstance(module, nn.Embedding) else nn.EmbeddingBag]
    module.__dict__[_RUN_TIME] = tables
    if plain not in _SPLIT_KINDS:
        kind = derived(kind, plain, name=plain.__name__, module=plain.__module__)
    object.__setattr__(module, "__class__", kind)


@eager
def _look_up(module: SplitEmbedding | SplitEmbeddingBag, ids: Tensor, take: Callable[..., Tensor]) -> Tensor:
    """What is taken from the rows, at places, but for a padding: collectives, which no compiler is to trace."""
    _refuse_transforms(module, ids)
    tables: SplitTables = module.__dict__[_RUN_TIME]
    rows, positions, padding = tables.look_up(module, ids)
    with _saved_as_it_is():
        return take(positions, rows, padding_idx=padding)


def _saved_as_it_is() -> AbstractContextManager[object]:
    """A context in which backward gets what forward saved, even under `torch.utils.checkpoint`.

    A lookup that is done again in backward makes a trip of its own, in which other rows lie, and these otherwise: its
    positions are none in the rows of the first, to which the gradient goes.
    """
    if _autograd._top_saved_tensors_default_hooks(True) is None:
        return nullcontext()
    return saved_tensors_hooks(Tensor.detach, lambda tensor: tensor)


def _refuse_transforms(module: SplitEmbedding | SplitEmbeddingBag, ids: Tensor) -> None:
    """Raise within `torch.func.vmap`, `grad`, `jacrev` and the like, from where no gradient comes to the owners."""
    if not is_transformed():
        return
    is_trained = torch.is_grad_enabled() and module.weight.requires_grad
    if is_trained or cast("Any", torch._C)._functorch.is_functorch_wrapped_tensor(ids):
        split = split_of(module.weight)
        if split is None:
            return  # a tensor in its place, which is refused as such
        raise ModelError(
            f"a transform of torch.func (vmap, grad, jacrev, ...) was to look up in {split.name!r}, which is split "
            "over the ranks: look up in front of it, and give it the rows; or keep the table whole in the plan"
        )


def _no_copy() -> ModelError:
    return ModelError(
        "a model with split tables was to be copied or pickled, which would take this rank's part only: "
        "take tulle.full_state_dict(model), or tulle.save; for a moving average, average model.parameters() in place"
    )
