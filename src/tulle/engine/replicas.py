"""Replicas at the start: every rank has the same model, and the values of rank 0."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from hashlib import sha256
from itertools import groupby

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tulle.comm import broadcast, gather_values
from tulle.errors import ModelError
from tulle.mesh import Axis
from tulle.parts import local_of
from tulle.tables import TableModule

CHUNK_BYTES = 25 * 1024 * 1024
"""Small tensors travel together in chunks of this size; a larger one travels alone, without a copy."""
_PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}
"""Methods that give the parts of sparse tensors."""
_NEXT = "which steps"


def check_alike(model: nn.Module, axis: Axis, optimizers: Sequence[Optimizer] = ()) -> None:
    """Raise on every rank, saying what differs, if the ranks' models or optimizers do not agree.

    Models agree in the names, shapes and dtypes of parameters and buffers and in how tables are looked up, optimizers
    in kind, options, and which parameters they step. Where only the order of these differs, groups take the model's.
    Every rank of the axis must call it.
    """
    mine = [_describe(model), [*_describe_optimizers(optimizers, model)]]
    digests = gather_values(sha256(repr(mine).encode()).hexdigest(), axis, label="the model")
    if len(set(digests)) == 1:
        return
    described = [[models, _whatever_order(stepped)] for models, stepped in gather_values(mine, axis, label="the model")]
    for rank, theirs in enumerate(described):
        found = (_first_difference(*both) for both in zip(described[0], theirs, strict=True))
        if difference := next((one for one in found if one is not None), None):
            raise ModelError(
                f"the models of rank 0 and rank {rank} of axis {axis.name!r} differ: {difference}: "
                "build the same model on every rank"
            )
    _put_in_order(optimizers, model)


def broadcast_tensors(tensors: Iterable[Tensor], axis: Axis, *, label: str) -> None:
    """Overwrite tensors with those of rank 0 of the axis. Every rank of the axis must call it, with the same ones."""
    if axis.size == 1:
        return
    chunk: list[Tensor] = []
    chunk_bytes = 0
    # As bytes they travel together whatever their dtype; the widest first, so that each begins where its dtype may.
    for tensor in sorted((part for one in tensors for part in memory_of(one)), key=lambda part: -part.itemsize):
        if chunk and chunk_bytes + tensor.nbytes > CHUNK_BYTES:
            _broadcast_chunk(chunk, axis, label)
            chunk, chunk_bytes = [], 0
        chunk.append(tensor)
        chunk_bytes += tensor.nbytes
    if chunk:
        _broadcast_chunk(chunk, axis, label)


def memory_of(tensor: Tensor) -> list[Tensor]:
    """What has to be written for a tensor to be written: each number once, the parts of a sparse tensor apart."""
    if tensor.layout in _PARTS:
        return [getattr(local_of(tensor), part)() for part in _PARTS[tensor.layout]]
    # Of what was expanded one number is seen in many places.
    return [local_of(tensor)[tuple(slice(None if stride else 1) for stride in tensor.stride())]]


@torch.no_grad()
def _broadcast_chunk(chunk: Sequence[Tensor], axis: Axis, label: str) -> None:
    alone = len(chunk) == 1 and chunk[0].is_contiguous()
    # A stride of a dimension of one may be anything, but to view it as bytes.
    flat = [tensor.reshape(-1).as_strided((tensor.numel(),), (1,)).view(torch.uint8) for tensor in chunk]
    sent = flat[0] if alone else torch.cat(flat)
    broadcast(sent, axis, label=label).wait()
    if alone:
        return
    for tensor, part in zip(chunk, sent.split([tensor.nbytes for tensor in chunk]), strict=True):
        tensor.copy_(part.view(tensor.dtype).view(tensor.shape))


def _describe(model: nn.Module) -> list[str]:
    described = [
        f"parameter {name} {str(p.dtype).removeprefix('torch.')} {list(p.shape)}{'' if p.requires_grad else ' frozen'}"
        for name, p in model.named_parameters()
    ]
    described += [
        f"lookup {name} {type(module).__name__}({_describe_lookup(module)})"
        for name, module in model.named_modules()
        if isinstance(module, TableModule)
    ]
    return described + [
        f"buffer {name} {str(b.dtype).removeprefix('torch.')} {list(b.shape)}{_describe_parts(b)}"
        for name, b in model.named_buffers()
    ]


def _describe_parts(buffer: Tensor) -> str:
    """Of a sparse buffer how many numbers it stores."""
    return "" if buffer.layout == torch.strided else f" {buffer.layout} of {buffer._nnz()}"


def _describe_lookup(module: TableModule) -> str:
    """As the plain class has it: a class that derives from it may say what is not alike on all ranks."""
    if isinstance(module, nn.Embedding):
        return nn.Embedding.extra_repr(module)
    # Which leaves out two of its options.
    untold = [option for option in ("sparse", "include_last_offset") if getattr(module, option)]
    return ", ".join([nn.EmbeddingBag.extra_repr(module), *(f"{option}=True" for option in untold)])


def _describe_optimizers(optimizers: Sequence[Optimizer], model: nn.Module) -> Iterator[str]:
    names = {id(parameter): repr(name) for name, parameter in model.named_parameters()}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            # In the optimizer's order: a group's own is that of a set for those that were made from one.
            keys = [*dict.fromkeys([*optimizer.defaults, *sorted(group)])]
            options = [f"{key}={_plain(group[key])}" for key in keys if key in group and not key.startswith("param")]
            yield " ".join([f"optimizer {type(optimizer).__name__}", *options])
            for parameter in group["params"]:
                name = names.get(id(parameter), f"a parameter {list(parameter.shape)} of no module of this model")
                yield f"optimizer {type(optimizer).__name__} {_NEXT} {name}"


def _whatever_order(lines: Sequence[str]) -> list[str]:
    """What describes optimizers, with the parameters of each group in one order."""
    runs = groupby(lines, key=lambda line: _NEXT in line)
    return [line for is_parameters, run in runs for line in (sorted(run) if is_parameters else run)]


def _put_in_order(optimizers: Sequence[Optimizer], model: nn.Module) -> None:
    """Give groups the model's order: that of a set differs in each process, and who steps which piece goes by it."""
    position = {id(parameter): number for number, (_, parameter) in enumerate(model.named_parameters())}
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        order = sorted(range(len(group["params"])), key=lambda at: position.get(id(group["params"][at]), -1))
        for key in {"params", "param_names"} & group.keys():
            group[key][:] = [group[key][at] for at in order]


def _plain(option: object) -> object:
    """What says the same on all ranks that have the same: no device, no address, no numbers of memory to write in."""
    if isinstance(option, Tensor):  # Muon's buffers of updates are in its groups, made by torch.empty
        return option.tolist() if option.numel() == 1 else f"{option.dtype} {list(option.shape)}"
    if isinstance(option, list | tuple):
        return [_plain(one) for one in option]
    return option if isinstance(option, int | float | str | None) else type(option).__name__


def _first_difference(ours: Sequence[str], theirs: Sequence[str]) -> str | None:
    for one, other in zip(ours, theirs, strict=False):
        if one != other:
            return f"{one} against {other}"
    if len(ours) != len(theirs):
        longer = ours if len(ours) > len(theirs) else theirs
        only = longer[min(len(ours), len(theirs))]
        return f"{only} is only on one of them"
    return None
