"""Checks before anything is written or changed: what can be read back, and whether a checkpoint is of this model."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any, cast
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_map_only

from tulle.checkpoint.placed import Sharded, is_dealt
from tulle.checkpoint.standing import Standing
from tulle.checkpoint.state import check_material, outline_of
from tulle.errors import CheckpointError
from tulle.memory import shard_of
from tulle.tables import split_of
from tulle.tensor_parallel import Placement
from tulle.traits import states_of


def check_readable(parts: Mapping[str, object]) -> None:
    """Raise if `load`, which runs no code from a file, could not read a part back. Tensors of torch's it always can."""
    for name, part in parts.items():
        buffer = io.BytesIO()
        try:
            torch.save(tree_map_only(Tensor, _unless_known, part), buffer)
            buffer.seek(0)
            torch.load(buffer, weights_only=True)
        except Exception as problem:  # pickle raises whatever a value's own code does
            raise CheckpointError(
                f"tulle.save was given {name}= a {type(part).__name__}, expected numbers, texts, tensors, lists and "
                "dictionaries of them, to be read without running code of a file: give its state_dict(), say"
            ) from problem


def _unless_known(tensor: Tensor) -> Tensor | None:
    """A tensor of a class that a reader may not know; None for one of torch's own, whose numbers are many."""
    return None if type(tensor) in (Tensor, nn.Parameter) else tensor


def check_keywords(extra: Mapping[str, object], standing: Standing) -> None:
    """Raise if tensors beside the model may be parts of what is spread over the ranks, as moving averages of it are.

    Of them rank 0's alone would be saved. Every rank must call it, and all raise.
    """
    shapes = {tuple(part.local_shape) for part in standing.parts.values()} | standing.shapes_of_stages()
    if not any(standing.ranks.gather(bool(shapes))):
        return
    pairs, _ = tree_flatten_with_path(extra)
    tensors = [(path, value) for path, value in pairs if isinstance(value, Tensor) and tuple(value.shape) in shapes]
    # Vectors are let be: losses so far, say, have at some step as many numbers as a bias.
    told = standing.ranks.gather({keystr(path): _digest(value) for path, value in tensors if value.dim() > 1})
    first, *others = told
    parted = next((name for one in others for name in one if name not in first or first[name] != one[name]), None)
    if parted is not None:
        raise CheckpointError(
            f"tulle.save was given a tensor {parted} of the shape of a part of a parameter, in which ranks have other "
            "numbers: of what is beside the model rank 0's is saved. Write the values into the model, or into a "
            "copy.deepcopy of it, and give tulle.full_state_dict of that"
        )


def check_states(optimizers: Sequence[Optimizer], standing: Standing) -> None:
    """Raise if an optimizer keeps something of a part that is neither shared out as that is nor alike on all ranks.

    A number for each row, say, of a layer that is split, or what it keeps of parts of another model: rank 0's alone
    would be saved. Every rank must call it, and all raise.
    """
    _check_whose(optimizers, standing)
    own = {
        f"{key!r} of {standing.name_of(parameter)!r}": _digest(value)
        for optimizer in optimizers
        for parameter, kept in states_of(optimizer).items()
        if isinstance(part := standing.share_of(parameter).part, Placement | Sharded)
        for key, value in kept.items()
        if isinstance(value, Tensor) and value.dim() and not is_dealt(value, part)
    }
    first: dict[str, int | None] = {}
    told = (pair for one in standing.ranks.gather(own) for pair in one.items())
    parted = next((name for name, digest in told if first.setdefault(name, digest) != digest), None)
    if parted is not None:
        raise CheckpointError(
            f"tulle.save was given an optimizer that keeps {parted}, a parameter of which ranks have parts, in a shape "
            "that is not the part's, with other numbers on other ranks: rank 0's alone would be saved. Use an "
            "optimizer whose state has the parameter's shape, or a plan that leaves the parameter whole"
        )


def _check_whose(optimizers: Sequence[Optimizer], standing: Standing) -> None:
    for optimizer in optimizers:
        for parameter in (one for group in optimizer.param_groups for one in group["params"]):
            if not standing.name_of(parameter) and (split_of(parameter) or shard_of(parameter)):
                raise CheckpointError(
                    f"tulle.save was given a {type(optimizer).__name__} that steps another model's parameter, of shape "
                    f"{list(parameter.shape)}, too, of which ranks have parts: rank 0's alone would be saved. Give it "
                    "all models as one, torch.nn.ModuleList([first, second]), and tulle.load as well; if the model has "
                    "another parameter in that one's place by now, an optimizer over those that it has"
                )


def check_model(saved: Mapping[str, Any], own: Mapping[str, Any], standing: Standing, path: object) -> None:
    """Raise if the model that was saved, in outline, has other names, shapes or dtypes.

    Args:
        saved: In outline.
        own: What this rank has of the model's state.
        standing: Says what that is.
        path: Of the checkpoint.
    """
    shapes = standing.shapes()
    for name, value in own.items():
        if name not in saved:
            raise CheckpointError(f"the checkpoint {str(path)!r} is of another model: it has no {name!r}")
        if isinstance(value, Tensor) and not standing.is_elsewhere(name):
            check_material((name,), value)
        theirs = saved[name]
        whole = outline_of(value, shapes.get(name, value.shape)) if isinstance(value, Tensor) else value
        if isinstance(whole, Tensor) and (not isinstance(theirs, Tensor) or _kind(whole) != _kind(theirs)):
            raise CheckpointError(
                f"the checkpoint {str(path)!r} is of another model: it has {name!r} as {_say(theirs)}, "
                f"the model has {_say(whole)}{_mend(theirs, whole)}"
            )
    for name in saved:
        if name not in own:
            raise CheckpointError(f"the checkpoint {str(path)!r} is of another model: it has {name!r} besides")


def check_optimizers(saved: Mapping[str, Any], optimizers: Sequence[Optimizer], path: object) -> None:
    """Raise if the optimizers that were saved, in outline, have other groups or kinds."""

    def sizes(groups: Sequence[Mapping[str, Any]]) -> list[int]:
        return [len(group["params"]) for group in groups]

    theirs = [sizes(one["param_groups"]) for one in saved["optimizers"]]
    ours = [sizes(one.param_groups) for one in optimizers]
    if theirs != ours:
        raise CheckpointError(
            f"the checkpoint {str(path)!r} has optimizers with groups of {theirs} parameters, these have {ours}: "
            "make the optimizers as they were when it was saved"
        )
    kinds = [type(one).__name__ for one in optimizers]
    if kinds != saved["kinds"]:
        raise CheckpointError(
            f"the checkpoint {str(path)!r} has the optimizers {', '.join(saved['kinds'])}, these are "
            f"{', '.join(kinds)}: make the optimizers as they were when it was saved"
        )


def _digest(tensor: Tensor) -> int | None:
    """Of a tensor's numbers; None if it has none here."""
    if tensor.is_meta or tensor.layout != torch.strided:
        return None
    values = tensor.detach().as_subclass(Tensor).cpu().contiguous().reshape(-1)
    return crc32(cast("Any", values.view(torch.uint8).numpy()))


def _kind(tensor: Tensor) -> tuple[torch.Size, torch.dtype]:
    return tensor.shape, tensor.dtype


def _mend(theirs: object, whole: Tensor) -> str:
    """What to do about a dtype, if nothing else differs."""
    if not isinstance(theirs, Tensor) or theirs.shape != whole.shape:
        return ""
    return ": give it the dtype that was saved before tulle.load, and convert it afterwards"


def _say(value: object) -> str:
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
