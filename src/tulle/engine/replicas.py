"""Replicas at the start: every rank has the same model, and the values of rank 0."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import sha256

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tulle.comm import broadcast, gather_values
from tulle.errors import ModelError
from tulle.mesh import Axis

CHUNK_BYTES = 25 * 1024 * 1024
"""Small tensors travel together in chunks of this size; a larger one travels alone, without a copy."""


def check_alike(model: nn.Module, axis: Axis, optimizers: Sequence[Optimizer] = ()) -> None:
    """Raise on every rank, saying what differs, if the ranks' models or optimizers do not agree.

    Models agree in the names, shapes and dtypes of parameters and buffers and in how tables are looked up, optimizers
    in kind and options. Every rank of the axis must call it.
    """
    mine = [*_describe_optimizers(optimizers), *_describe(model)]
    digests = gather_values(sha256("\n".join(mine).encode()).hexdigest(), axis, label="the model")
    if len(set(digests)) == 1:
        return
    described = gather_values(mine, axis, label="the model")
    for rank, theirs in enumerate(described):
        difference = _first_difference(described[0], theirs)
        if difference is not None:
            raise ModelError(
                f"the models of rank 0 and rank {rank} of axis {axis.name!r} differ: {difference}: "
                "build the same model on every rank"
            )


def broadcast_tensors(tensors: Iterable[Tensor], axis: Axis, *, label: str) -> None:
    """Overwrite tensors with those of rank 0 of the axis. Every rank of the axis must call it, with the same ones."""
    if axis.size == 1:
        return
    chunk: list[Tensor] = []
    for tensor in tensors:
        kept = [*chunk, tensor]
        if chunk and (chunk[0].dtype != tensor.dtype or sum(t.nbytes for t in kept) > CHUNK_BYTES):
            _broadcast_chunk(chunk, axis, label)
            kept = [tensor]
        chunk = kept
    if chunk:
        _broadcast_chunk(chunk, axis, label)


@torch.no_grad()
def _broadcast_chunk(chunk: Sequence[Tensor], axis: Axis, label: str) -> None:
    alone = len(chunk) == 1 and chunk[0].is_contiguous()
    flat = chunk[0].detach().view(-1) if alone else torch.cat([tensor.detach().reshape(-1) for tensor in chunk])
    broadcast(flat.view(torch.uint8), axis, label=label).wait()  # as bytes: gloo has no bool, for one
    if alone:
        return
    for tensor, part in zip(chunk, flat.split([tensor.numel() for tensor in chunk]), strict=True):
        tensor.copy_(part.view(tensor.shape))


def _describe(model: nn.Module) -> list[str]:
    described = [
        f"parameter {name} {str(p.dtype).removeprefix('torch.')} {list(p.shape)}{'' if p.requires_grad else ' frozen'}"
        for name, p in model.named_parameters()
    ]
    described += [
        f"lookup {name} {type(module).__name__}({_describe_lookup(module)})"
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag)
    ]
    return described + [
        f"buffer {name} {str(b.dtype).removeprefix('torch.')} {list(b.shape)}" for name, b in model.named_buffers()
    ]


def _describe_lookup(module: nn.Embedding | nn.EmbeddingBag) -> str:
    """As the plain class has it: a class that derives from it may say what is not alike on all ranks."""
    return nn.Embedding.extra_repr(module) if isinstance(module, nn.Embedding) else nn.EmbeddingBag.extra_repr(module)


def _describe_optimizers(optimizers: Sequence[Optimizer]) -> list[str]:
    return [
        f"optimizer {type(optimizer).__name__} "
        + " ".join(f"{option}={_plain(value)}" for option, value in group.items() if not option.startswith("param"))
        for optimizer in optimizers
        for group in optimizer.param_groups
    ]


def _plain(option: object) -> object:
    """What says the same on all ranks that have the same: no device, no address."""
    if isinstance(option, Tensor):
        return option.tolist()
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
