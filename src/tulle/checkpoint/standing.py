"""`Standing`: what this rank has of a model, under plain names, and what of it is this rank's to write."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from tulle.checkpoint.called import Called
from tulle.checkpoint.placed import Part, Sharded, Share, memory_of
from tulle.checkpoint.ranks import Ranks, distributed
from tulle.distribute.adopted import axes_of
from tulle.engine import engine_of
from tulle.errors import CheckpointError, ModelError
from tulle.memory import named_shards, state_of_shards
from tulle.pipeline import placement_of
from tulle.spread import spread_of
from tulle.tables.split import split_of
from tulle.tensor_parallel import placements, state_of_parts
from tulle.traits import saved_otherwise

T = TypeVar("T")


class Standing:
    """What this rank has of a model. Every rank of the model's mesh must make one.

    Args:
        model: Distributed, a module of such a model, or plain.

    Raises:
        CheckpointError: On every rank, if parts of it are saved in a way of their own.
    """

    def __init__(self, model: nn.Module) -> None:
        _check_whole_is_known(model)
        self._model = model
        whole = distributed(model)
        self.axes = axes_of(whole)
        self.ranks = Ranks.of(whole)
        parameters = dict(model.named_parameters(remove_duplicate=False))
        self._names = {id(parameter): name for name, parameter in reversed([*parameters.items()])}
        self.parts: dict[str, Part] = {n: split for n, p in parameters.items() if (split := split_of(p)) is not None}
        """This rank's part of each parameter that is split, by name."""
        engine = engine_of(whole)
        self._in_step = {n for n, p in parameters.items() if engine is not None and engine.slot_of(p) is not None}
        """Names of the parameters that are the same on all ranks of axis `data`, and so is their optimizer's state."""
        if self.axes is not None:
            over_model = placements(model)
            self.parts |= over_model
            self.parts |= {name: Sharded(shard, over_model.get(name)) for name, shard in named_shards(model).items()}

        pipe = self.axes.pipe if self.axes else None
        self.is_staged = pipe is not None
        """Whether other ranks have other tensors."""
        self.stage_rank = pipe.rank if pipe else 0
        """Along axis `pipe`."""
        tensors = self._tensors = {**parameters, **_saved_buffers(model)}
        self._held = {n: (tensor.dtype, tuple(tensor.shape)) for n, tensor in tensors.items() if not tensor.is_meta}
        """Dtype and shape of each tensor that this rank has, all or a part."""
        told = Ranks(pipe).gather((self._held, frozenset(tensors)))
        everywhere, names = [held for held, _ in told], [known for _, known in told]
        self.holders = {n: rank for rank in reversed(range(len(everywhere))) for n in everywhere[rank]}
        """The first rank along axis `pipe` that has each tensor."""
        self._others = {n: everywhere[rank][n] for n, rank in self.holders.items() if n not in self._held}
        """Dtype and shape of each tensor that only others have."""
        self._made_late = sorted(frozenset.union(*names) - frozenset.intersection(*names))
        """Names of buffers that a forward has made: on the ranks of its stage, and nowhere else."""
        self.unknown = frozenset(self._made_late) - tensors.keys()
        """Names of those among them that this rank's modules have not."""

        axes = (self.axes.data, self.axes.pipe, self.axes.model) if self.axes else ()
        self.place = {axis.name: [axis.rank, axis.size] for axis in axes if axis is not None and axis.size > 1}
        """This rank's place and size along each axis of the mesh."""
        placement = placement_of(whole)
        self.pipeline = placement.runtime if placement else None
        """Which draws random numbers in a way of its own."""

    def state(self) -> Mapping[str, Any]:
        """The model's `state_dict`, with this rank's parts of what is split by `distribute`.

        Every rank must call it, before it asks for what this rank has of a tensor: the state may call it otherwise.

        Raises:
            CheckpointError: On every rank, if parts cannot be told from wholes in it.
        """
        if self.axes is None:
            return self._model.state_dict()
        with state_of_parts(), state_of_shards():
            state = self._model.state_dict()
        if self.parts or self.is_staged:
            self._learn_names(state)
        for name in self._others.keys() & state.keys():  # a forward may have made it another
            dtype, shape = self._others[name]
            here = self._tensors.get(name)
            is_buffer = here is not None and not isinstance(here, nn.Parameter) and name not in self.parts
            is_resized = is_buffer and state[name].shape != shape
            state[name] = _empty(dtype, shape) if is_resized else state[name].to(dtype)
        for name in self._made_late:  # in one order on all ranks
            state[name] = state.pop(name) if name in self._held else _empty(*self._others[name])
        return state

    def as_known_here(self, name: str, value: Tensor) -> Tensor:
        """What `load_state_dict` takes here for a tensor of another stage, where a forward may have resized it."""
        here = self._tensors.get(name, value)
        return value if here.shape == value.shape else here

    def _learn_names(self, state: Mapping[str, Any]) -> None:
        """Know what a state calls otherwise than the model does, as where a hook leaves out a prefix."""
        held = {name: tensor for name, tensor in self._tensors.items() if name in self._held}
        found = Called.of(state, held, known=self.holders, parts=held if self.is_staged else self.parts)
        called = Called.together(self.ranks.gather(found), type(self._model).__name__)
        _know_too(self.parts, called)
        _know_too(self.holders, called)
        _know_too(self._held, called)
        _know_too(self._others, called)
        self._in_step |= {key for key, name in called.items() if name in self._in_step}

    def first_names(self, state: Mapping[str, Any]) -> dict[str, str]:
        """Of each tensor of the model's state the first of its names. Every rank of the mesh must call it."""
        by_memory: dict[object, str] = {}
        mine = {
            name: by_memory.setdefault(memory_of(value) or name, name)
            for name, value in state.items()
            if isinstance(value, Tensor) and not self.is_elsewhere(name)
        }
        pipe = self.axes.pipe if self.axes else None
        return {name: first for theirs in Ranks(pipe).gather(mine) for name, first in theirs.items()}

    def share(self, name: str) -> Share:
        """What this rank has of a tensor of the model's state."""
        part, holder, is_alike = self.parts.get(name), self.holders.get(name, 0), name in self._in_step
        if self.axes is None:
            is_writer, copies = self.ranks.is_first, (self.ranks.rank, self.ranks.size)
            return Share(
                part,
                writes_whole=is_writer,
                writes_sections=is_writer,
                is_alike=is_alike,
                copies=copies if is_alike else None,
            )
        is_here, data = holder == self.stage_rank, self.axes.data
        is_first_replica, is_first_part = data.rank == 0, self.axes.model is None or self.axes.model.rank == 0
        # Of what the ranks of each host share out there are as many replicas as hosts.
        is_first_host = not isinstance(part, Sharded) or data.ranks[0] in part.shard.axis.ranks
        return Share(
            part,
            holder,
            writes_whole=is_here and is_first_replica and is_first_part,
            writes_sections=is_here and is_first_replica,
            writes_rows=is_here and is_first_part and is_first_host,
            writes_both=is_here and is_first_host,
            is_alike=is_alike,
            copies=(data.rank, data.size) if is_alike and is_here and is_first_part else None,
        )

    def share_of(self, parameter: Tensor) -> Share:
        """What this rank has of a parameter, and so of its optimizer's state."""
        return self.share(self.name_of(parameter))

    def name_of(self, parameter: Tensor) -> str:
        """A parameter's name in the model; empty if it has none there."""
        return self._names.get(id(parameter), "")

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the wholes of what is split, by name."""
        return {name: tuple(part.shape) for name, part in self.parts.items()}

    def shapes_of_stages(self) -> set[tuple[int, ...]]:
        """Of what this rank's stage has, or others do, if there are stages."""
        tensors = [*self._model.parameters(), *self._model.buffers()] if self.is_staged else []
        return {tuple(tensor.shape) for tensor in tensors}

    def is_elsewhere(self, name: str) -> bool:
        """Whether a tensor lives at other stages only."""
        return name in self.holders and name not in self._held


def _know_too(known: dict[str, T], called: Mapping[str, str]) -> None:
    """Enter under each other name what is known by a name."""
    known |= {key: known[name] for key, name in called.items() if name in known}


def _empty(dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _saved_buffers(model: nn.Module) -> dict[str, Tensor]:
    """A model's buffers, but for those that its state leaves out."""
    left_out = {(module, name) for module in model.modules() for name in module._non_persistent_buffers_set}
    return {
        f"{path}.{name}" if path else name: buffer
        for path, module in model.named_modules(remove_duplicate=False)
        for name, buffer in module._buffers.items()
        if buffer is not None and (module, name) not in left_out
    }


def _check_whole_is_known(model: nn.Module) -> None:
    """Refuse what is no module, and models with parts that `distribute` did not make, which nobody here can join."""
    if not isinstance(model, nn.Module):
        raise ModelError(f"tulle was given a {type(model).__name__} as model, expected a torch.nn.Module")
    if (found := saved_otherwise(model)) is not None:
        name, module, saver = found
        raise CheckpointError(
            f"the module {name!r} ({type(module).__name__}) has parts of its parameters on each rank, of which "
            f"only {saver} knows: save and load the model with that"
        )
    if axes_of(distributed(model)) is None and any(spread_of(parameter) for parameter in model.parameters()):
        raise CheckpointError(
            "the model was placed by pipeline.place alone, and each rank has its own stages of it: have "
            "tulle.distribute place it (plan=tulle.Plan(stages=...), or sample=), which saves and loads the whole"
        )
