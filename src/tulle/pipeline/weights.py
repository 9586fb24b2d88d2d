"""Takes those weights of a checkpoint that this rank holds: safetensors, files of `torch.save`, `load_state_dict`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tulle.deferred import give
from tulle.errors import CheckpointError
from tulle.parts import local_of
from tulle.pipeline.elsewhere import refuse_alone
from tulle.pipeline.lent import is_lacking

_INDEX, _WHOLE = "model.safetensors.index.json", "model.safetensors"


def read_weights(path: str | Path, tensors: Mapping[str, Tensor], device: torch.device) -> None:
    """Fill parameters and buffers from a checkpoint; others in it are not read.

    Args:
        path: A folder with `model.safetensors` or its shards and their index (as Hugging Face saves them), one such
            file, or a file of `torch.save(model.state_dict())`.
        tensors: To be filled, by their names in the checkpoint.
        device: Where to.

    Raises:
        CheckpointError: If there is no such file, a tensor is not in it, or has another shape.
    """
    missing = set(tensors)
    for name, value in _read(Path(path), set(tensors)):
        tensor = tensors[name]
        if value.shape != tensor.shape:
            raise CheckpointError(
                f"{name!r} has the shape {list(value.shape)} in {path}, expected {list(tensor.shape)}: it is of "
                "another model"
            )
        value = value.to(device, tensor.dtype)
        if is_lacking(tensor, device):
            give(tensor, value)
        else:
            local_of(tensor).copy_(value)
        missing.discard(name)
    if missing:
        raise CheckpointError(
            f"{path} does not hold {sorted(missing)[:3]} ... ({len(missing)}): it is of another model"
        )


def _read(path: Path, wanted: set[str]) -> Iterator[tuple[str, Tensor]]:
    if path.is_dir() and (path / _INDEX).exists():
        places: dict[str, str] = json.loads((path / _INDEX).read_text())["weight_map"]
        for file in sorted({places[name] for name in wanted if name in places}):
            yield from _read_shard(path / file, wanted)
    elif path.is_dir():
        yield from _read_shard(path / _WHOLE, wanted)
    elif path.suffix == ".safetensors":
        yield from _read_shard(path, wanted)
    else:
        if not path.exists():
            raise CheckpointError(f"{path} does not exist: give a folder or a file of weights")
        for name, value in torch.load(path, map_location="cpu", mmap=True, weights_only=True).items():
            if name in wanted:
                yield name, value


def _read_shard(file: Path, wanted: set[str]) -> Iterator[tuple[str, Tensor]]:
    try:
        from safetensors import safe_open
    except ModuleNotFoundError as error:
        raise CheckpointError(f"{file} is in a format that needs safetensors: pip install safetensors") from error
    if not file.exists():
        raise CheckpointError(f"{file} does not exist: give a folder with {_WHOLE} or {_INDEX}, or a file of weights")
    with safe_open(file, framework="pt") as shard:
        for name in shard.keys():  # noqa: SIM118 - it is no mapping
            if name in wanted:
                yield name, shard.get_tensor(name)


def pass_over_others(model: nn.Module) -> None:
    """Have `load_state_dict` pass over what lives at other stages in silence; torch would warn of each tensor."""
    for module in model.modules():
        if any(tensor.is_meta for _, tensor in _own(module)):
            module.register_load_state_dict_pre_hook(_forget_others)


def _forget_others(module: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
    for name, tensor in _own(module):
        if tensor.is_meta and isinstance(value := state.get(prefix + name), Tensor):
            refuse_alone(f"load_state_dict() of {name!r}", tensor, [value])
            state[prefix + name] = value.to("meta")


def _own(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return chain(module.named_parameters(recurse=False), module.named_buffers(recurse=False))
