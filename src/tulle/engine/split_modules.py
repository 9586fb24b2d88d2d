"""Embeddings whose table is split: the user's modules, with a forward that fetches rows from their owners."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._guards import CompileContext
from torch.autograd.graph import saved_tensors_hooks

from tulle.comm import eager
from tulle.derived import derived
from tulle.engine.lookup_gradients import pooled
from tulle.engine.split_tables import SplitTables
from tulle.errors import ModelError
from tulle.parts import is_transformed, read_by
from tulle.tables import ColumnSplit, Lookup, Split, TableModule, has_own_forward, split_of

TAKE_PLAIN = "load tulle.full_state_dict(model, everywhere=True) into a plain model, and take that"
"""What to do where a model is wanted that does without tulle, as errors say it."""
_RUN_TIME = "_tulle_split_tables"
_autograd: Any = vars(torch._C)["_autograd"]


class _Parted:
    """A module that cannot be copied: a copy would hold a part of a table and no way to the rest."""

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise _no_copy()

    def _replicate_for_data_parallel(self) -> NoReturn:
        raise _no_copy()

    def __prepare_scriptable__(self) -> NoReturn:
        raise _no_capture()


class SplitEmbedding(_Parted, nn.Embedding):
    """`nn.Embedding` of which this rank holds a part; `num_embeddings` and `embedding_dim` are those of the whole."""

    def forward(self, input: Tensor) -> Tensor:
        """Look up. Every rank must call it, each with its own ids."""
        return _look_up(self.__dict__[_RUN_TIME], Lookup.of(self), input, F.embedding)


class SplitEmbeddingBag(_Parted, nn.EmbeddingBag):
    """`nn.EmbeddingBag` of which this rank holds a part."""

    def forward(self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        """Look up and pool. Every rank must call it, each with its own ids."""
        pool = partial(
            pooled,
            offsets=offsets,
            mode=self.mode,
            per_sample_weights=per_sample_weights,
            include_last_offset=self.include_last_offset,
        )
        return _look_up(self.__dict__[_RUN_TIME], Lookup.of(self), input, pool)


class SplitByItself(_Parted, nn.Module):
    """A class with a forward of its own that looks up, by `super().forward` say, in a table that is split."""

    @eager
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Its own. Every rank must call it; what it asks of its table, `_Reader` answers."""
        tables: SplitTables = self.__dict__[_RUN_TIME]
        with tables.forward():
            return super().forward(*args, **kwargs)


def adopt(module: TableModule, tables: SplitTables) -> None:
    """Have a module look up in a split table: its class becomes one that derives from its own."""
    plain, table = type(module), cast("nn.Parameter", module.weight)
    kind: type = SplitEmbedding if isinstance(module, nn.Embedding) else SplitEmbeddingBag
    kind = SplitByItself if has_own_forward(module) else kind
    module.__dict__[_RUN_TIME] = tables
    read_by(table, _Reader(tables, tables.table_of(Lookup(table)).split))
    name = kind.__name__ if plain in (nn.Embedding, nn.EmbeddingBag) else plain.__name__
    object.__setattr__(module, "__class__", derived(kind, plain, name=name, module=plain.__module__))


@dataclass(frozen=True, slots=True)
class _Reader:
    """Answers what the model's own code asks of a split table as if all of it were here."""

    tables: SplitTables
    split: Split

    @property
    def shape(self) -> tuple[int, int]:
        """`(rows, width)` of the whole."""
        return self.split.shape

    @property
    def is_forward(self) -> bool:
        """Whether the model's own code is running, and not a compiler that looks at what it is to compile."""
        return self.tables.is_forward and CompileContext.try_get() is None

    def look_up(
        self, function: Callable[..., Tensor], ids: Tensor, part: Tensor, *, sparse: bool, **options: Any
    ) -> Tensor:
        """What `F.embedding` or `F.embedding_bag` gives. Every rank must call it, each with its own ids."""
        how = Lookup(part, **{name: options.pop(name) for name in Lookup._fields if name in options})
        found = self.tables.table_of(how)
        if found.is_sparse and not sparse and part.requires_grad and torch.is_grad_enabled():
            raise ModelError(
                f"{function.__name__} was asked for rows of {found.name!r} with sparse=False, but its module has "
                "sparse=True: the gradient would be sparse and dense at once. Pass sparse=True, or make the module "
                "without"
            )
        if how.max_norm is not None and isinstance(self.split, ColumnSplit):
            raise ModelError(
                f"{function.__name__} was asked for rows of {found.name!r} with max_norm={how.max_norm}, which needs "
                "norms of whole rows, and it is split by columns: split it by rows"
            )
        if how.padding_idx is not None and how.padding_idx < 0:
            how = how._replace(padding_idx=how.padding_idx + self.shape[0])
        take = pooled if function is F.embedding_bag else function
        return _look_up(self.tables, how, ids, partial(take, **options))


@eager
def _look_up(tables: SplitTables, how: Lookup, ids: Tensor, take: Callable[..., Tensor]) -> Tensor:
    """What is taken from the rows, at places, but for a padding: collectives, which no compiler is to trace."""
    check_not_captured()
    _refuse_transforms(how.table, ids)
    rows, positions, padding = tables.look_up(how, ids)
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


def _refuse_transforms(table: Tensor, ids: Tensor) -> None:
    """Raise within `torch.func.vmap`, `grad`, `jacrev` and the like, from where no gradient comes to the owners."""
    if not is_transformed():
        return
    is_trained = torch.is_grad_enabled() and table.requires_grad
    if is_trained or cast("Any", torch._C)._functorch.is_functorch_wrapped_tensor(ids):
        split = split_of(table)
        if split is None:
            return  # a tensor in its place, which is refused as such
        raise ModelError(
            f"a transform of torch.func (vmap, grad, jacrev, ...) was to look up in {split.name!r}, which is split "
            "over the ranks: look up in front of it, and give it the rows; or keep the table whole in the plan"
        )


def check_not_captured() -> None:
    """Raise where what a model does is taken down, to be done without it, from where nobody fetches rows.

    Raises:
        ModelError: Within `torch.jit.trace` and `torch.export`, by which models go to ONNX.
    """
    if cast("Any", torch.jit).is_tracing() or torch.compiler.is_exporting():
        raise _no_capture()


def _no_capture() -> ModelError:
    return ModelError(
        "a model with split tables was to be traced, scripted or exported (torch.jit, torch.export, torch.onnx), and "
        f"what comes of that would know only the rows that this rank has: {TAKE_PLAIN}"
    )


def _no_copy() -> ModelError:
    return ModelError(
        "a model with split tables was to be copied or pickled, which would take this rank's part only: "
        "take tulle.full_state_dict(model), or tulle.save; for a moving average, average model.parameters() in place"
    )
