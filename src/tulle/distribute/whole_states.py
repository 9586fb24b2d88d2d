"""Optimizers load states of plain models' optimizers, of which each rank takes its part: see `take_wholes`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from tulle.memory import named_shards
from tulle.tables import split_of
from tulle.tensor_parallel import placements

Cuts = Mapping[tuple[int, ...], Callable[[Tensor], Tensor]]
"""How a rank takes its part of a parameter, along one axis after the other, by the shape of what it is cut from."""


def take_wholes(model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Have `load_state_dict` of a model's optimizers take states of whole parameters, or of this rank's parts.

    States of parameters that live at other stages are passed over.
    """
    cuts = _cuts_of(model)
    for optimizer in optimizers:
        optimizer.register_load_state_dict_pre_hook(partial(_take_parts, cuts))


def _cuts_of(model: nn.Module) -> dict[Tensor, Cuts]:
    parameters = dict(model.named_parameters(remove_duplicate=False))
    cuts: dict[Tensor, dict[tuple[int, ...], Callable[[Tensor], Tensor]]] = {}
    for name, placement in placements(model).items():
        cuts.setdefault(parameters[name], {})[tuple(placement.shape)] = placement.part
    for name, shard in named_shards(model).items():
        cuts.setdefault(parameters[name], {})[tuple(shard.shape)] = shard.part
    for parameter in parameters.values():
        if (split := split_of(parameter)) is not None:
            cuts.setdefault(parameter, {})[split.shape] = split.take
    return {**cuts}


def _take_parts(cuts: Mapping[Tensor, Cuts], optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    taken = dict(state["state"])
    for number, parameter in zip(numbers, parameters, strict=False):  # torch itself refuses unequal numbers of them
        entries = taken.pop(number, None)
        if entries is not None and not parameter.is_meta:
            taken[number] = {key: _part(value, cuts.get(parameter, {})) for key, value in entries.items()}
    return {**state, "state": taken}


def _part(value: Any, cuts: Cuts) -> Any:
    for shape, take in cuts.items():
        if isinstance(value, Tensor) and tuple(value.shape) == shape:
            value = take(value)
    return value
