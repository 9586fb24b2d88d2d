"""Optimizers load states of plain models' optimizers, of which each rank takes its part: see `take_wholes`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakSet

from torch import Tensor, nn
from torch.optim import Optimizer

from tulle.distribute.adopted import axes_of
from tulle.distribute.axes import Axes
from tulle.distribute.held import Held
from tulle.engine import engine_of
from tulle.errors import CheckpointError
from tulle.memory import named_shards
from tulle.mesh import Axis
from tulle.parts import WHOSE, StatedPart, local_of, refuse_to_checkpoint, stated_part
from tulle.tables import split_of
from tulle.tensor_parallel import placements
from tulle.traits import has_hooks, states_of


@dataclass(frozen=True, slots=True)
class _Cut:
    """How a rank takes its part of a parameter along an axis, by the whole or by what it has of it along another."""

    axis: Axis
    take: Callable[[Tensor], Tensor]
    shape_of_part: Callable[[Sequence[int]], object] | None = None
    """Of a table: what it gives for the shape of anything that it takes its part of, None for all else."""


Cuts = Mapping[tuple[int, ...], _Cut]
"""Those of a parameter, along one axis after the other, by the shape of what is cut."""


_later: WeakSet[Optimizer] = WeakSet()
"""Optimizers that were made after their model was distributed."""


def take_wholes(model: nn.Module, optimizers: Sequence[Optimizer], axes: Axes) -> None:
    """Have `load_state_dict` of a model's optimizers take states of whole parameters, or of this rank's parts.

    States of parameters that live at other stages are passed over. What `state_dict` gives says whose parts it has,
    because those of another rank may have the same shapes, and are refused.
    """
    cuts = _cuts_of(model)
    if axes.pipe is not None:
        model.register_state_dict_post_hook(_refuse_stages)
    for optimizer in optimizers:
        _watch(optimizer, cuts, axes.pipe)


def take_wholes_later(optimizer: Optimizer) -> None:
    """The same for an optimizer that was made after `distribute`, from its first step on; what it has loaded, too."""
    if optimizer in _later or not has_hooks(optimizer):  # a wrapper, whose states are those of the one that it wraps
        return
    _later.add(optimizer)
    engines = {engine_of(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    models = [engine.model.whole for engine in engines if engine is not None and isinstance(engine.model, Held)]
    found = [(model, axes) for model in models if (axes := axes_of(model)) is not None]
    if not found:
        return
    # Of all its models at once: each alone would take the parts of the others for those of another rank.
    cuts = {parameter: some for model, _ in found for parameter, some in _cuts_of(model).items()}
    for parameter, entries in states_of(optimizer).items():
        if parameter.is_meta:
            del optimizer.state[parameter]
        for key, value in entries.items():
            entries[key] = _part(value, cuts.get(parameter, {}))
    _watch(optimizer, cuts, next((axes.pipe for _, axes in found if axes.pipe is not None), None))


def _watch(optimizer: Optimizer, cuts: Mapping[Tensor, Cuts], pipe: Axis | None) -> None:
    optimizer.register_load_state_dict_pre_hook(partial(_take_parts, cuts, pipe))
    optimizer.register_state_dict_post_hook(partial(_say_whose, cuts, pipe))


def _cuts_of(model: nn.Module) -> dict[Tensor, Cuts]:
    parameters = dict(model.named_parameters(remove_duplicate=False))
    cuts: dict[Tensor, dict[tuple[int, ...], _Cut]] = {}
    for name, placement in placements(model).items():
        cuts.setdefault(parameters[name], {})[tuple(placement.shape)] = _Cut(placement.axis, placement.part)
    for name, shard in named_shards(model).items():
        cuts.setdefault(parameters[name], {})[tuple(shard.shape)] = _Cut(shard.axis, shard.part)
    for parameter in parameters.values():
        if (split := split_of(parameter)) is not None:
            cuts.setdefault(parameter, {})[split.shape] = _Cut(split.axis, split.take, split.shape_of_part)
    return {**cuts}


def _whose(cuts: Mapping[Tensor, Cuts], pipe: Axis | None, optimizer: Optimizer) -> str:
    """Which parts this rank has of what an optimizer steps: its place along all axes over which that lies; or none."""
    stepped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    found = {cut.axis.name: cut.axis for parameter in stepped for cut in cuts.get(parameter, {}).values()}
    if pipe is not None and any(parameter.is_meta for parameter in stepped):
        found[pipe.name] = pipe
    return " and ".join(f"rank {axis.rank} of {axis.size} of axis {name!r}" for name, axis in sorted(found.items()))


def _say_whose(
    cuts: Mapping[Tensor, Cuts], pipe: Axis | None, optimizer: Optimizer, state: dict[str, Any]
) -> dict[str, Any] | None:
    whose, kind = _whose(cuts, pipe, optimizer), type(optimizer).__name__
    if not whose:
        return None
    refuse_to_checkpoint(f"the state of an optimizer ({kind}) that has the parts of {whose}")
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    stated = dict(state["state"])
    for number, parameter in enumerate(parameters):
        if parameter in cuts and number in stated:
            said = f"{whose}'s part of {kind}'s state"
            stated[number] = {
                key: stated_part(local_of(value), said)
                if isinstance(value, Tensor) and value.shape == parameter.shape
                else value
                for key, value in stated[number].items()
            }
    return {**state, "state": stated, WHOSE: whose}


def _refuse_stages(model: nn.Module, state: dict[str, Any], *_: object) -> None:
    if any(isinstance(value, Tensor) and value.is_meta for value in state.values()):
        refuse_to_checkpoint(f"the state of a {type(model).__name__}, of whose stages each rank has its own")


def _take_parts(
    cuts: Mapping[Tensor, Cuts], pipe: Axis | None, optimizer: Optimizer, state: dict[str, Any]
) -> dict[str, Any]:
    whose, own = state.get(WHOSE), _whose(cuts, pipe, optimizer)
    if whose is not None and whose != own:
        raise CheckpointError(
            f"a state of {type(optimizer).__name__} has the parts of {whose}, and this is {own or 'a rank of wholes'}: "
            "give each rank what it saved itself, or use tulle.save and tulle.load, which keep the parts of all"
        )
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    taken = dict(state["state"])
    for number, parameter in zip(numbers, parameters, strict=False):  # torch itself refuses unequal numbers of them
        entries = taken.pop(number, None)
        if entries is not None and not parameter.is_meta:
            taken[number] = {key: _part(value, cuts.get(parameter, {})) for key, value in entries.items()}
    return {**state, "state": taken}


def _part(value: Any, cuts: Cuts) -> Any:
    value = value.as_subclass(Tensor) if isinstance(value, StatedPart) else value
    for shape, cut in cuts.items() if isinstance(value, Tensor) else ():
        is_cut = cut.shape_of_part(value.shape) is not None if cut.shape_of_part else tuple(value.shape) == shape
        value = cut.take(value) if is_cut else value
    return value
