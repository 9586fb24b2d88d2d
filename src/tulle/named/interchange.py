"""The edges: DTensors in and out, and checkpoints that load under any other layout and mesh.

`torch.distributed.checkpoint` stores what DTensors say of their parts, so a checkpoint knows whole tensors by name and
nothing of layouts. Inside the library there are none.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load as load_parts
from torch.distributed.checkpoint.state_dict_saver import save as save_parts
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from tulle.errors import CheckpointError, ModelError
from tulle.named.dims import Dim, Dims, as_dims, spelled
from tulle.named.edges import from_torch
from tulle.named.module import check_initialized, named_parameters
from tulle.named.optimizer import largest_two
from tulle.named.scope import Scope, current
from tulle.named.tensor import Tensor
from tulle.named.wire import ProcessWire
from tulle.whole_folder import WholeFolder

_METADATA = ".metadata"


def to_dtensor(tensor: Tensor) -> DTensor:
    """The same parts as a DTensor on the mesh, its dimensions in the order of `tensor.dims`; nothing travels.

    Raises:
        ModelError: If the tensor does not live on a mesh.
    """
    return _as_dtensor(tensor.local, tensor.dims, tensor.scope)


def from_dtensor(tensor: DTensor, dims: Dim | tuple[Dim, ...]) -> Tensor:
    """A DTensor's numbers as a named tensor under the layout in force. Every rank must call it.

    Raises:
        ModelError: If its shape is not that of the dimensions.
    """
    dims = as_dims(dims)
    if tuple(tensor.shape) != tuple(dim.size for dim in dims):
        raise ModelError(f"from_dtensor was given shape {tuple(tensor.shape)} for dimensions {spelled(dims)}")
    scope = current()
    wire = scope.wire_or_none
    if isinstance(wire, ProcessWire) and tensor.device_mesh.mesh_dim_names == tuple(wire.mesh.shape):
        wanted = _placements(dims, scope, wire)
        return Tensor(tensor.redistribute(placements=wanted).to_local(), dims)
    return from_torch(tensor.full_tensor(), dims)


def save(folder: str | os.PathLike[str], model: nn.Module, optimizer: torch.optim.Optimizer, **extra: int) -> None:
    """Save a named model and its optimizer as a folder that any other layout and mesh can load.

    It is complete or absent: written aside, then renamed. Every rank must call it. Of the optimizer it keeps the
    states; learning rates and the like are those of the one that is made for `load`.

    Args:
        folder: Where; a checkpoint that is there is replaced, nothing else.
        model: Its parameters by name, whole.
        optimizer: torch's, or `Adafactor`.
        **extra: Integers to save with it, such as the step.

    Raises:
        CheckpointError: On every rank, if one of the extra is no integer, something is there that is no checkpoint, or
            it cannot be written; an older one is then as it was.
    """
    for name, value in extra.items():
        if not isinstance(value, int):
            raise CheckpointError(f"save was given {name}={value!r} to save with a model, expected an integer")
    check_initialized(model)
    whole = _whole(folder)
    state = {**_state(model, optimizer), **{f"extra.{name}": torch.tensor(value) for name, value in extra.items()}}
    _first_does(whole.prepare, whole)
    with _quiet_if_alone():
        save_parts(state, checkpoint_id=whole.aside)
    _first_does(whole.commit, whole)


def load(
    folder: str | os.PathLike[str], model: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> dict[str, int]:
    """Load what `save` saved, whatever layout the model has now; gives the extra numbers. Every rank must call it.

    Without an optimizer the model alone is loaded, as to evaluate it.

    Raises:
        CheckpointError: On every rank, if there is none, or it is of another model.
    """
    check_initialized(model)
    path = _whole(folder).found
    _check_there(path)
    stored = FileSystemReader(path).read_metadata().state_dict_metadata
    if optimizer is not None:
        _begin_states(model, optimizer)
        _forget_states(model, optimizer, stored)
    state = _state(model, optimizer)
    _check_alike(path, state, stored)
    extra = {name: torch.tensor(0) for name in stored if name.startswith("extra.")}
    with _quiet_if_alone():
        load_parts(cast("dict[str, Any]", {**state, **extra}), checkpoint_id=path)
    if optimizer is not None:
        _take_steps(model, optimizer, state)
    return {name.removeprefix("extra."): int(value) for name, value in extra.items()}


def _whole(folder: str | os.PathLike[str]) -> WholeFolder:
    return WholeFolder(folder, _METADATA, "tn.save")


def _first_does(work: Callable[[], None], whole: WholeFolder) -> None:
    """Have rank 0 do what one rank must, once all have come here, and every rank raise what it raises."""
    said: list[str | None] = [None]
    _meet()
    if _is_first():
        try:
            work()
        except CheckpointError as problem:
            said = [str(problem)]
        except OSError as problem:
            said = [f"cannot write the checkpoint {str(whole.path)!r}: {problem}; an older one is as it was"]
    if dist.is_initialized():
        dist.broadcast_object_list(said)
    if said[0] is not None:
        raise CheckpointError(said[0])


def _check_there(path: Path) -> None:
    """Refuse a checkpoint that is not there, or that some ranks do not see, on every rank alike.

    Raises:
        CheckpointError: Naming the first such rank.
    """
    is_there = [(path / _METADATA).exists()]
    if dist.is_initialized():
        mine, is_there = is_there[0], [True] * dist.get_world_size()
        dist.all_gather_object(is_there, mine)
    if not all(is_there):
        where = "" if len(is_there) == 1 else f" for rank {is_there.index(False)}"
        raise CheckpointError(
            f"there is no checkpoint of a named model at {path}{where}: save one with tn.save, on a file system that "
            "all ranks share"
        )


def _check_alike(path: Path, state: Mapping[str, torch.Tensor], stored: Mapping[str, Any]) -> None:
    """Refuse a checkpoint that lacks something, has it in another shape, or has more of a model than this one.

    Raises:
        CheckpointError: Naming the first such thing.
    """
    for name in sorted(state):
        if name not in stored:
            raise CheckpointError(f"the checkpoint at {path} has no {name!r}: it is of another model or optimizer")
        there, here = tuple(stored[name].size), tuple(state[name].shape)
        if there != here:
            raise CheckpointError(
                f"the checkpoint at {path} has {name!r} of shape {there}, the model of {here}: it is of another model; "
                "build this one with the sizes, and the order of dimensions, of that one"
            )
    if besides := sorted(name for name in stored if name.startswith("model.") and name not in state):
        raise CheckpointError(
            f"the checkpoint at {path} has {besides[0]!r} besides, which the model has not: it is of another model"
        )


def _state(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """Every parameter, plain tensor and optimizer state by name, as DTensors that share their memory."""
    state: dict[str, Any] = {}
    named = {id(one.parameter): one for _, one in named_parameters(model)}
    kept = {} if optimizer is None else optimizer.state
    for name, parameter in model.named_parameters():
        one = named.get(id(parameter))
        state[f"model.{name}"] = parameter.detach() if one is None else _stored(parameter.detach(), one.dims, one.scope)
        for key, value in kept.get(parameter, {}).items():
            dims = None if one is None else _dims_of_state(key, value, one.dims, one.scope)
            whole = value if isinstance(value, torch.Tensor) else torch.tensor(value)
            state[f"optimizer.{name}.{key}"] = whole if one is None or dims is None else _stored(whole, dims, one.scope)
    for name, buffer in model.named_buffers():
        state[f"model.{name}"] = buffer
    return state


def _dims_of_state(key: str, value: Any, dims: Dims, scope: Scope) -> Dims | None:
    """The dimensions of an optimizer's state: the parameter's, or those that Adafactor's row and column keep."""
    matrix = largest_two(dims)
    if matrix is not None and key in ("row", "column"):
        lost = matrix[1] if key == "row" else matrix[0]
        return tuple(dim for dim in dims if dim != lost)
    is_alike = isinstance(value, torch.Tensor) and tuple(value.shape) == scope.local_shape(dims) and dims
    return dims if is_alike else None


def _begin_states(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Have the optimizer make its states, by a step that leaves the parameters as they are."""
    parameters = [one for one in model.parameters() if one.requires_grad]
    if all(optimizer.state.get(one) for one in parameters):
        return
    kept = [(one, one.grad, one.detach().clone()) for one in parameters]
    for one in parameters:
        one.grad = torch.zeros_like(one)
    optimizer.step()
    with torch.no_grad():
        for one, gradient, value in kept:
            one.copy_(value)
            one.grad = gradient


def _forget_states(model: nn.Module, optimizer: torch.optim.Optimizer, stored: Collection[str]) -> None:
    """Leave without a state those parameters that had none when they were saved: they were not updated yet."""
    begun = {name.rpartition(".")[0] for name in stored}
    for name, parameter in model.named_parameters():
        if f"optimizer.{name}" not in begun:
            optimizer.state.pop(parameter, None)


def _take_steps(model: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Give the optimizer the states that are numbers, which could not be loaded in place."""
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            if not isinstance(value, torch.Tensor):
                optimizer.state[parameter][key] = type(value)(state[f"optimizer.{name}.{key}"].item())


def _stored(local: torch.Tensor, dims: Dims, scope: Scope) -> torch.Tensor:
    return _as_dtensor(local, dims, scope) if isinstance(scope.wire_or_none, ProcessWire) else local


def _as_dtensor(local: torch.Tensor, dims: Dims, scope: Scope) -> DTensor:
    wire = scope.wire_or_none
    if not isinstance(wire, ProcessWire):
        raise ModelError(f"a tensor of dimensions {spelled(dims)} lives on no mesh: make it inside tn.use")
    kept = wire.mesh.axes[0].kept
    if _as_dtensor not in kept:
        kept[_as_dtensor] = wire.mesh.device_mesh()
    return DTensor.from_local(local, kept[_as_dtensor], _placements(dims, scope, wire), run_check=False)


def _placements(dims: Dims, scope: Scope, wire: ProcessWire) -> list[Placement]:
    split = scope.axes(dims, "a DTensor of")
    return [Shard(dims.index(split[axis])) if axis in split else Replicate() for axis in wire.mesh.shape]


@contextmanager
def _quiet_if_alone() -> Iterator[None]:
    """A process without others knows that it is alone, of which torch warns."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield


def _is_first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _meet() -> None:
    if dist.is_initialized():
        dist.barrier()
