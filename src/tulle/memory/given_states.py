"""`give_whole_states`: `state_dict` of an optimizer whose state is sharded is whole, and `load_state_dict` takes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from tulle.traits import states_of


class Shards(Protocol):
    """The shards of an optimizer's state."""

    def is_apart(self, parameter: nn.Parameter) -> bool:
        """Whether a parameter is not cut into pieces."""
        ...

    def whole_state(self) -> dict[Tensor, dict[str, Any]]:
        """States by parameter. Every rank must call it."""
        ...

    def take_parts(self, whole: Mapping[Any, Any]) -> None:
        """Keep this rank's parts of states by parameter."""
        ...

    def refresh_masters(self) -> None:
        """Have masters follow the parameters."""
        ...


def give_whole_states(optimizer: Optimizer, shards: Shards) -> None:
    """Have `state_dict` give whole states, and `load_state_dict` take them."""
    kept: list[Any] = []

    def give_whole(optimizer: Optimizer) -> None:
        kept.append(dict(optimizer.state))
        whole = shards.whole_state()
        for piece in states_of(optimizer):
            del optimizer.state[piece]
        optimizer.state.update(whole)

    def keep_part(optimizer: Optimizer, _: object) -> None:
        optimizer.state.clear()
        optimizer.state.update(kept.pop())

    def set_aside(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        by_number = _by_number(optimizer, state)
        cut = {key: its for key, its in state["state"].items() if not _is_apart(shards, by_number.get(key))}
        kept.append({by_number.get(key, key): its for key, its in cut.items()})
        apart = {key: its for key, its in state["state"].items() if key not in cut}
        return {**state, "state": apart}  # torch would cast moments to the dtype of narrow parameters

    def take_parts(optimizer: Optimizer) -> None:
        shards.refresh_masters()
        shards.take_parts({**optimizer.state, **kept.pop()})

    optimizer.register_state_dict_pre_hook(give_whole)
    optimizer.register_state_dict_post_hook(keep_part)
    optimizer.register_load_state_dict_pre_hook(set_aside)
    optimizer.register_load_state_dict_post_hook(take_parts)


def _is_apart(shards: Shards, parameter: nn.Parameter | None) -> bool:
    return parameter is not None and shards.is_apart(parameter)


def _by_number(optimizer: Optimizer, state: Mapping[str, Any]) -> dict[int, nn.Parameter]:
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return dict(zip(numbers, parameters, strict=False))  # torch itself refuses unequal numbers of them
