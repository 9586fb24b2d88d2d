"""`State`: what a checkpoint holds of a model and its optimizers: a small outline, and tensors with their places."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import KeyPath, MappingKey, SequenceKey, tree_map_with_path

from tulle.checkpoint.placed import Path, Placed, Places, Share
from tulle.checkpoint.standing import Standing
from tulle.errors import CheckpointError
from tulle.parts import WHOSE, local_of
from tulle.tables.split import Split


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
class Names:
    """What the tensors of a checkpoint are called.

    Args:
        paths: Of the state's keys that lead to each, by name; of several names of one tensor that of the first.
        aliases: The other names.
    """

    paths: dict[str, Path]
    aliases: list[Alias]


@dataclass(frozen=True, slots=True)
class State:
    """A state whose tensors have places.

    Args:
        outline: Dictionaries and lists as `state_dict` gives them, with each tensor on device meta, in its whole shape.
        tensors: The tensors that this rank has.
        names: Of those of all ranks, once they are brought `together`.
    """

    outline: dict[str, Any]
    tensors: list[Placed]
    names: Names

    def told(self) -> tuple[Names, list[dict[Any, Any]]]:
        """What other ranks must hear of: names, and the outline of each optimizer's state."""
        return self.names, [one["state"] for one in self.outline["optimizers"]]

    def together(self, heard: Sequence[tuple[Names, list[dict[Any, Any]]]]) -> State:
        """The same with what all ranks have told."""
        names = Names({}, [])
        optimizers = [{**one, "state": {}} for one in self.outline["optimizers"]]
        for theirs, states in heard:
            known = {alias.name for alias in names.aliases}
            names.paths.update(theirs.paths)
            names.aliases.extend(alias for alias in theirs.aliases if alias.name not in known)
            for one, state in zip(optimizers, states, strict=True):
                one["state"] |= state
        for one in optimizers:
            one["state"] = dict(sorted(one["state"].items(), key=lambda pair: (isinstance(pair[0], str), pair[0])))
        return State({**self.outline, "optimizers": optimizers}, self.tensors, names)

    @staticmethod
    def of(standing: Standing, optimizers: Sequence[Optimizer]) -> State:
        """What this rank has to save."""
        places, tensors = Places(), list[Placed]()

        def outlined(path: Path, value: object, share: Share) -> object:
            if isinstance(value, np.generic):  # as a schedule computes it; the safe reader refuses it
                return value.item()
            if isinstance(value, Tensor) and value.is_sparse and share.part is not None:
                value = value.to_dense()  # the momentum of this rank's rows
            if not isinstance(value, Tensor) or not _is_strided(value):
                return value
            if path[0] == "model" and standing.is_elsewhere(str(path[1])):
                return outline_of(value, share.part.shape if share.part else value.shape)
            check_material(path, value)
            tensors.append(places.place(path, value, share))
            return outline_of(value, tensors[-1].shape)

        own = standing.state()  # what gathers it from other ranks comes first
        outline = {
            "model": _mapped(dict(own), ("model",), _by_name(standing), outlined),
            "versions": versions_of(own),
            "optimizers": [
                _mapped(_saved_of(one), ("optimizers", number), _of_parameters(one, standing), outlined)
                for number, one in enumerate(optimizers)
            ],
            "kinds": [type(one).__name__ for one in optimizers],
        }
        firsts: dict[object, Placed] = {}
        named = [(placed, firsts.setdefault(placed.memory, placed)) for placed in tensors]
        aliases = [Alias(other.name, other.path, first.name) for other, first in named if other is not first]
        tensors = list(firsts.values())
        return State(outline, tensors, Names({one.name: one.path for one in tensors}, aliases))


def model_room(
    standing: Standing, own: Mapping[str, Any], outline: Mapping[str, Any]
) -> tuple[dict[str, Any], list[Placed]]:
    """A model's own state, to be read into: what to give to `load_state_dict` afterwards, and its tensors.

    Args:
        standing: Says what this rank has of the model.
        own: The model's state, whose tensors are overwritten.
        outline: Of the model that was saved; what is no tensor is taken from it.
    """
    places, tensors = Places(), dict[object, Placed]()

    def placed(path: Path, value: object, share: Share) -> object:
        if not isinstance(value, Tensor) or not _is_strided(value):
            return value
        if standing.is_elsewhere(str(path[1])):
            return standing.as_known_here(str(path[1]), value)
        if value.is_meta:  # within an extra state
            value = torch.empty(value.shape, dtype=value.dtype)
        made = places.place(path, value, share)
        tensors[made.memory] = made  # of two names of one tensor the last counts, as in load_state_dict
        return value

    others = {name: value for name, value in outline.items() if not _is_strided(own[name])}
    return _mapped({**own, **others}, ("model",), _by_name(standing), placed), list(tensors.values())


def optimizer_room(
    standing: Standing, number: int, optimizer: Optimizer, outline: Mapping[str, Any]
) -> tuple[dict[str, Any], list[Placed]]:
    """Fresh memory for an optimizer's state: what to give to `load_state_dict` once it was read into, and its tensors.

    Args:
        standing: Says what this rank has of each parameter, and so of its state.
        number: Of the optimizer in the list.
        optimizer: That will have the state.
        outline: Of the state that was saved.
    """
    places, tensors = Places(), list[Placed]()
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    elsewhere = {index for index, parameter in enumerate(parameters) if parameter.is_meta}

    def fresh(path: Path, value: object, share: Share) -> object:
        if not isinstance(value, Tensor):
            return value
        part = share.part
        if isinstance(part, Split):
            shape = part.shape_of_part(value.shape)
        else:
            shape = part.local_shape if part is not None and tuple(value.shape) == tuple(part.shape) else None
        if not value.is_meta:
            return part.take(value) if isinstance(part, Split) and shape is not None else value
        parameter = local_of(parameters[number]) if (number := _number_in(path)) is not None else None
        if shape is not None and parameter is not None:
            made = torch.zeros(shape, dtype=value.dtype, device=parameter.device)
        elif parameter is not None and value.shape == parameter.shape:
            made = torch.empty_like(parameter, dtype=value.dtype, device="cpu")  # fused steps go by the memory format
        else:
            made = torch.empty(value.shape, dtype=value.dtype)
        tensors.append(places.place(path, made, share))
        return made

    own = {
        **outline,
        "state": {index: one for index, one in outline["state"].items() if index not in elsewhere},
        "param_groups": [
            _functions(ours) | saved
            for ours, saved in zip(optimizer.param_groups, outline["param_groups"], strict=True)
        ],
    }
    return _mapped(own, ("optimizers", number), _of_parameters(optimizer, standing), fresh), tensors


def versions_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """Versions of the modules' formats, which `state_dict` leaves as an attribute of its result."""
    told = getattr(state, "_metadata", {})
    return {module: {key: value for key, value in said.items() if key != WHOSE} for module, said in told.items()}


def unmarked(state: Mapping[str, Any]) -> dict[str, Any]:
    """An optimizer's state without the word whose parts it has: those of all ranks are saved."""
    return {key: value for key, value in state.items() if key != WHOSE}


def _saved_of(optimizer: Optimizer) -> dict[str, Any]:
    """Its state but for functions in its groups (LARS asks one what to leave alone): those are the program's."""
    state = unmarked(optimizer.state_dict())
    groups = [{key: value for key, value in group.items() if not callable(value)} for group in state["param_groups"]]
    return {**state, "param_groups": groups}


def _functions(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if callable(value)}


def with_versions(state: Mapping[str, Any], versions: Mapping[str, Any]) -> OrderedDict[str, Any]:
    """A state as `state_dict` gives it."""
    ordered = OrderedDict(state)
    vars(ordered)["_metadata"] = OrderedDict(versions)
    return ordered


ShareOf = Callable[[Path], Share]
Leaf = Callable[[Path, object, Share], object]


def _mapped(
    state: Mapping[str, Any],
    prefix: Path,
    share_of_leaf: ShareOf,
    function: Leaf,
) -> dict[str, Any]:
    """A state with each leaf replaced by what a function of its path, its value and this rank's share of it gives."""

    def mapped(keys: KeyPath, value: object) -> object:
        path = (*prefix, *map(_key, keys))
        return function(path, value, share_of_leaf(path))

    return tree_map_with_path(mapped, state)


def _key(key: object) -> str | int:
    if isinstance(key, SequenceKey):
        return key.idx
    return str(key.key) if isinstance(key, MappingKey) else str(key)


def _by_name(standing: Standing) -> ShareOf:
    """By path `model`, name."""
    return lambda path: standing.share(str(path[1]))


def _of_parameters(optimizer: Optimizer, standing: Standing) -> ShareOf:
    """By path `optimizers`, number, `state`, parameter, key."""
    shares = [standing.share_of(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    others = Share(writes_whole=standing.ranks.is_first)
    return lambda path: others if (number := _number_in(path)) is None else shares[number]


def _number_in(path: Path) -> int | None:
    """Of the parameter to whose state a path of an optimizer's leads; by a name it may keep what is of none."""
    return int(path[3]) if path[2] == "state" and str(path[3]).isdecimal() else None


def check_material(path: Path, tensor: Tensor) -> None:
    """Raise if a tensor has no memory."""
    if tensor.is_meta:
        raise CheckpointError(
            f"{'.'.join(map(str, path))!r} is on device meta, expected memory: give the model its values first "
            "(tulle.distribute does)"
        )


def outline_of(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """A tensor on device meta, of this shape."""
    return torch.empty(tuple(shape), dtype=tensor.dtype, device="meta")


def _is_strided(value: object) -> bool:
    return isinstance(value, Tensor) and value.layout == torch.strided
