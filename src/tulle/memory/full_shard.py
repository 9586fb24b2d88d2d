"""Full sharding along an axis: torch's `fully_shard`, put on the modules that repeat and on what is left.

Source: Rajbhandari et al., *ZeRO* (2020), section 5.3; Zhao et al., *PyTorch FSDP* (VLDB'23).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from tulle.errors import ModelError
from tulle.memory.recompute import repeated
from tulle.mesh import Mesh
from tulle.names import as_names

M = TypeVar("M", bound=nn.Module)


def shard_fully(
    model: M, mesh: Mesh, *, axis: str = "data", modules: Sequence[str] | None = None, narrow: torch.dtype | None = None
) -> M:
    """Shard parameters, gradients and optimizer state over an axis, in place. Every rank of the axis must call it.

    Each module's parameters are gathered before its forward and its backward, and its gradients, the means over the
    axis, are reduced to their owners: what data parallelism would do besides. Make the optimizer afterwards: the
    parameters are other objects then.

    Args:
        model: On the mesh's device, with the same weights on every rank.
        mesh: Of the run.
        axis: Over whose ranks to shard.
        modules: Names of those that are gathered one at a time; None for those that repeat.
        narrow: In which to compute; gradients are reduced in it too, and parameters stay as they are.

    Raises:
        ModelError: If the model has no such module, or a parameter is tied across two of them.

    Example:
        >>> import torch, tulle
        >>> mesh = tulle.init(data=-1)
        >>> model = shard_fully(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)), mesh)
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # half a second that others need not wait

    named = dict(model.named_modules())
    chosen = list(repeated(model)) if modules is None else list(as_names(modules))
    if missing := [name for name in chosen if name not in named]:
        raise ModelError(
            f"memory.shard_fully was given {missing[0]!r}, but the {type(model).__name__} has no module of that name"
        )
    _check_tied(model, chosen)
    options: dict[str, Any] = {"mesh": mesh.device_mesh()[axis]}
    if narrow is not None:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=narrow)
    for name in chosen:
        fully_shard(named[name], **options)
    fully_shard(model, **options)
    return model


def whole_state_dict(model: nn.Module) -> dict[str, Any]:
    """A model's `state_dict` with whole, plain tensors. Every rank of the axis must call it.

    Example:
        >>> import torch
        >>> whole_state_dict(torch.nn.Linear(1, 1, bias=False)).keys()
        dict_keys(['weight'])
    """
    state = model.state_dict()
    return {name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in state.items()}


def _check_tied(model: nn.Module, chosen: Sequence[str]) -> None:
    """Raise if two of the modules, or one and what is outside all of them, share a parameter."""
    homes: dict[int, tuple[str, str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        home = next((module for module in chosen if name.startswith(f"{module}.")), "")
        first, other = homes.setdefault(id(parameter), (name, home))
        if other != home:
            raise ModelError(
                f"{name} is tied to {first}, and they would be sharded with different modules: give modules= without "
                f"{home or other}"
            )
