"""Checks before anything is written or changed: what can be read back, and whether a checkpoint is of this model."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from tulle.checkpoint.standing import Standing
from tulle.checkpoint.state import check_material, outline_of
from tulle.errors import CheckpointError


def check_readable(parts: Mapping[str, object]) -> None:
    """Raise if `load`, which runs no code from a file, could not read a part back. Tensors it always can."""
    for name, part in parts.items():
        buffer = io.BytesIO()
        try:
            torch.save(tree_map_only(Tensor, lambda _: None, part), buffer)
            buffer.seek(0)
            torch.load(buffer, weights_only=True)
        except Exception as problem:  # pickle raises whatever a value's own code does
            raise CheckpointError(
                f"tulle.save was given {name}= a {type(part).__name__}, expected numbers, texts, tensors, lists and "
                "dictionaries of them, to be read without running code of a file: give its state_dict(), say"
            ) from problem


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
                f"the model has {_say(whole)}"
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


def _kind(tensor: Tensor) -> tuple[torch.Size, torch.dtype]:
    return tensor.shape, tensor.dtype


def _say(value: object) -> str:
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
