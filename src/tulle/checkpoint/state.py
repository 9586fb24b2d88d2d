"""`State`: what a checkpoint holds of a model and its optimizers: a small outline, and tensors with their places."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import KeyPath, MappingKey, SequenceKey, tree_map_with_path

from tulle.checkpoint.placed import Path, Placed, Places
from tulle.errors import CheckpointError
from tulle.tables.split import ColumnSplit, Split, split_of


@dataclass(frozen=True, slots=True)
class Alias:
    """A further name of a tensor.

    Args:
        name: This name.
        path: Of the state's keys that lead to it.
        first: The name under which the tensor is saved.
    """

    name: str
    path: Path
    first: str


@dataclass(frozen=True, slots=True)
class State:
    """A state whose tensors have places.

    Args:
        outline: Dictionaries and lists as `state_dict` gives them, with each tensor on device meta, in its whole shape.
        tensors: The tensors; of several names of one tensor only that of the first.
        aliases: The other names.
    """

    outline: dict[str, Any]
    tensors: list[Placed]
    aliases: list[Alias]

    @staticmethod
    def of(model: nn.Module, optimizers: Sequence[Optimizer], places: Places) -> State:
        """What there is to save."""
        tensors: list[Placed] = []

        def outlined(path: Path, value: object, split: Split | None) -> object:
            if isinstance(value, np.generic):  # as a schedule computes it; the safe reader refuses it
                return value.item()
            if isinstance(value, Tensor) and value.is_sparse and split is not None:
                value = value.to_dense()  # the momentum of this rank's rows
            if not isinstance(value, Tensor) or not _is_strided(value):
                return value
            check_material(path, value)
            tensors.append(places.place(path, value, split))
            return outline_of(value, tensors[-1].shape)

        own = model.state_dict()  # what gathers it from other ranks comes first
        outline = {
            "model": _mapped(dict(own), ("model",), _by_name(named_splits(model)), outlined),
            "versions": versions_of(own),
            "optimizers": [
                _mapped(one.state_dict(), ("optimizers", number), _splits_of_state(one), outlined)
                for number, one in enumerate(optimizers)
            ],
            "kinds": [type(one).__name__ for one in optimizers],
        }
        firsts: dict[object, Placed] = {}
        named = [(placed, firsts.setdefault(placed.memory, placed)) for placed in tensors]
        aliases = [Alias(other.name, other.path, first.name) for other, first in named if other is not first]
        return State(outline, list(firsts.values()), aliases)


def model_room(
    own: Mapping[str, Any], splits: Mapping[str, Split], outline: Mapping[str, Any], places: Places
) -> tuple[dict[str, Any], list[Placed]]:
    """A model's own state, to be read into: what to give to `load_state_dict` afterwards, and its tensors.

    Args:
        own: The model's `state_dict()`, whose tensors are overwritten.
        splits: Of its tables that are split, by name.
        outline: Of the model that was saved; what is no tensor is taken from it.
        places: Gives the tensors their places.
    """
    tensors: dict[object, Placed] = {}

    def placed(path: Path, value: object, split: Split | None) -> object:
        if not isinstance(value, Tensor) or not _is_strided(value):
            return value
        if value.is_meta:  # within an extra state
            value = torch.empty(value.shape, dtype=value.dtype)
        made = places.place(path, value, split)
        tensors[made.memory] = made  # of two names of one tensor the last counts, as in load_state_dict
        return value

    others = {name: value for name, value in outline.items() if not _is_strided(own[name])}
    return _mapped({**own, **others}, ("model",), _by_name(splits), placed), list(tensors.values())


def optimizer_room(
    number: int, optimizer: Optimizer, outline: Mapping[str, Any], places: Places
) -> tuple[dict[str, Any], list[Placed]]:
    """Fresh memory for an optimizer's state: what to give to `load_state_dict` once it was read into, and its tensors.

    Args:
        number: Of the optimizer in the list.
        optimizer: Whose parameters say how the state of each is dealt.
        outline: Of the state that was saved.
        places: Gives the tensors their places.
    """
    tensors: list[Placed] = []
    splits = _splits_of_state(optimizer)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]

    def fresh(path: Path, value: object, split: Split | None) -> object:
        if not isinstance(value, Tensor):
            return value
        is_dealt = split is not None and tuple(value.shape) == split.shape
        if not value.is_meta:
            return _dealt(value, split) if is_dealt and split is not None else value
        if is_dealt and split is not None:
            device = parameters[int(path[3])].device
            made = torch.zeros(split.local_shape, dtype=value.dtype, device=device)
        else:
            made = torch.empty(value.shape, dtype=value.dtype)
        tensors.append(places.place(path, made, split))
        return made

    return _mapped(dict(outline), ("optimizers", number), splits, fresh), tensors


def named_splits(model: nn.Module) -> dict[str, Split]:
    """How each of a model's split tables is dealt, by all names that it has."""
    parameters = model.named_parameters(remove_duplicate=False)
    return {name: split for name, parameter in parameters if (split := split_of(parameter)) is not None}


def versions_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """Versions of the modules' formats, which `state_dict` leaves as an attribute of its result."""
    return dict(getattr(state, "_metadata", {}))


def with_versions(state: Mapping[str, Any], versions: Mapping[str, Any]) -> OrderedDict[str, Any]:
    """A state as `state_dict` gives it."""
    ordered = OrderedDict(state)
    vars(ordered)["_metadata"] = OrderedDict(versions)
    return ordered


SplitOf = Callable[[Path], Split | None]
Leaf = Callable[[Path, object, Split | None], object]


def _mapped(
    state: Mapping[str, Any],
    prefix: Path,
    split_of_leaf: SplitOf,
    function: Leaf,
) -> dict[str, Any]:
    """A state with each leaf replaced by what a function of its path, its value and its split gives."""

    def mapped(keys: KeyPath, value: object) -> object:
        path = (*prefix, *map(_key, keys))
        return function(path, value, split_of_leaf(path))

    return tree_map_with_path(mapped, state)


def _key(key: object) -> str | int:
    if isinstance(key, SequenceKey):
        return key.idx
    return str(key.key) if isinstance(key, MappingKey) else str(key)


def _by_name(splits: Mapping[str, Split]) -> SplitOf:
    """By path `model`, name."""
    return lambda path: splits.get(str(path[1]))


def _splits_of_state(optimizer: Optimizer) -> SplitOf:
    """By path `optimizers`, number, `state`, parameter, key."""
    splits = [split_of(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    return lambda path: splits[int(path[3])] if path[2] == "state" else None


def check_material(path: Path, tensor: Tensor) -> None:
    """Raise if a tensor has no memory."""
    if tensor.is_meta:
        raise CheckpointError(
            f"{'.'.join(map(str, path))!r} is on device meta, expected memory: give the model its values first "
            "(tulle.distribute does)"
        )


def _dealt(value: Tensor, split: Split) -> Tensor:
    """This rank's part of a row-sparse state, the momentum of sparse gradients, say, that was not split when saved."""
    value = value.coalesce()
    rows, values = value.indices()[0], value.values()
    if isinstance(split, ColumnSplit):
        values = values[:, split.first_column : split.first_column + split.local_shape[1]]
    else:
        owner, place = split.partition.place(rows)
        rows, values = place[owner == split.axis.rank], values[owner == split.axis.rank]
    return torch.sparse_coo_tensor(rows[None], values, split.local_shape)


def outline_of(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """A tensor on device meta, of this shape."""
    return torch.empty(tuple(shape), dtype=tensor.dtype, device="meta")


def _is_strided(value: object) -> bool:
    return isinstance(value, Tensor) and value.layout == torch.strided
