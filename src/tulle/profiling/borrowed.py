"""`Borrowed`: tables that a twin reads where they lie, so that a profile takes no second copy of what is largest.

A table that is looked up, and nothing else, is read by forward and written by the optimizer alone. So the twin's model
has the table's own memory, and its optimizer writes in another one of that shape, whose memory comes page by page as
rows are touched: it is that of a step's rows, not that of the table.
"""

from __future__ import annotations

import mmap
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Optimizer, SparseAdam

from tulle.deferred import is_deferred

_BY_ROWS: Collection[type[Optimizer]] = (SGD, Adagrad, SparseAdam)
"""Those that touch the rows of a sparse gradient alone."""
_LARGE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Borrowed:
    """What takes the place of one table in a twin.

    Args:
        read: The parameter of the twin's model, in the table's own memory.
        written: What the twin's optimizer has for it; the same, if nothing is trained.
        state: What takes the place of the optimizer's state for it, by the identity of each tensor.
        begun: What its first step would make, and write in all of: SparseAdam's means.
    """

    read: nn.Parameter
    written: nn.Parameter
    state: Mapping[int, Tensor]
    begun: Mapping[str, object]

    def hand_over(self) -> None:
        """Give the optimizer the gradient that backward gave the model, or None."""
        if self.written is not self.read:
            self.written.grad = self.read.grad


def borrowed(model: nn.Module, optimizers: Sequence[Optimizer]) -> dict[int, Borrowed]:
    """The tables of a model that a twin may borrow, by the identity of the parameter: on CPUs, of torch's modules.

    Example:
        >>> model = nn.Sequential(nn.EmbeddingBag(100, 8, sparse=True), nn.Linear(8, 1))
        >>> len(borrowed(model, [SGD(model.parameters())]))
        1
    """
    readers: dict[int, list[nn.Module]] = defaultdict(list)
    for module in model.modules():
        for parameter in module._parameters.values():
            readers[id(parameter)].append(module)
    owners = {id(p): one for one in optimizers for group in one.param_groups for p in group["params"]}
    return {
        id(parameter): _borrow(parameter, owners.get(id(parameter)))
        for parameter in model.parameters()
        if _is_plain(parameter)
        and all(_only_looks_up(module) for module in readers[id(parameter)])
        and (not parameter.requires_grad or type(owners.get(id(parameter))) in _BY_ROWS)
    }


def _is_plain(parameter: nn.Parameter) -> bool:
    return (
        type(parameter) is nn.Parameter
        and not is_deferred(parameter)
        and parameter.device.type == "cpu"
        and parameter.is_contiguous()
    )


def _only_looks_up(module: nn.Module) -> bool:
    """Whether a module is torch's own, reads rows and gives them gradients as rows; with `max_norm` it writes them."""
    return (
        any(type(module) is kind for kind in (nn.Embedding, nn.EmbeddingBag))
        and isinstance(module.weight, nn.Parameter)
        and (module.sparse is True or not module.weight.requires_grad)
        and module.max_norm is None
        and not (module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))
    )


def _borrow(table: nn.Parameter, owner: Optimizer | None) -> Borrowed:
    read = nn.Parameter(table.data, table.requires_grad)
    if not table.requires_grad:
        return Borrowed(read, read, {}, {})
    state = owner.state.get(table, {}) if owner is not None else {}
    alike = [one for one in state.values() if isinstance(one, Tensor) and one.shape == table.shape and _is_dense(one)]
    is_new = type(owner) is SparseAdam and not state
    begun = {"step": 0, "exp_avg": _zeros(table), "exp_avg_sq": _zeros(table)} if is_new else {}
    return Borrowed(read, nn.Parameter(_zeros(table)), {id(one): _zeros(one) for one in alike}, begun)


def _is_dense(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and tensor.device.type == "cpu"


def _zeros(like: Tensor) -> Tensor:
    """As many zeros, each page of which takes memory when it is first written; torch writes in all of its own."""
    if like.nbytes < _LARGE_BYTES:
        return torch.zeros_like(like)
    memory = mmap.mmap(-1, like.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        memory.madvise(mmap.MADV_NOHUGEPAGE)  # else a page has a thousand rows
    return torch.frombuffer(memory, dtype=like.dtype).view(like.shape)


def fit_optimizers(tables: Sequence[Borrowed], optimizers: Iterable[Optimizer]) -> None:
    """Have a twin's optimizers find what their first step would make.

    Those of a model that holds its optimizer step what is read, after all: that is copied.
    """
    owners = {id(p): one for one in optimizers for group in one.param_groups for p in group["params"]}
    own(tables, owners)
    for one in tables:
        if one.begun and id(one.written) in owners:
            owners[id(one.written)].state[one.written] = {**one.begun}


def own(tables: Iterable[Borrowed], parameters: Collection[int]) -> None:
    """Have a twin copy what is not only looked up after all: who reads a table otherwise may write in it, too.

    Args:
        tables: What it has borrowed.
        parameters: Of its model, by identity.
    """
    for one in tables:
        if id(one.read) in parameters and one.read.requires_grad:
            one.read.data = one.read.data.clone()
