"""Modules whose calls cannot be followed, refused by name: those of TorchScript, and those that a forward puts in."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from tulle.errors import ModelError


def refuse_scripted(model: nn.Module) -> None:
    """Raise if a part of a model is TorchScript's.

    Raises:
        ModelError: Naming it.
    """
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise ModelError(
                f"{name!r} is a ScriptModule, whose calls cannot be seen, and which reads its parameters past Python, "
                "so that it can be neither profiled nor put on one rank: give the module as it was before torch.jit"
            )


def kinds_of(model: nn.Module) -> dict[str, type[nn.Module]]:
    """The class of each module by name.

    Example:
        >>> list(kinds_of(nn.Sequential(nn.Tanh())))
        ['', '0']
    """
    return {name: type(module) for name, module in model.named_modules()}


def refuse_replaced(before: Mapping[str, type[nn.Module]], model: nn.Module) -> None:
    """Raise if a model has other modules than before its forward.

    Args:
        before: `kinds_of` the model then.
        model: As it is now.

    Raises:
        ModelError: Naming one.
    """
    now = kinds_of(model)
    changed = next((name for name in {**before, **now} if before.get(name) is not now.get(name)), None)
    if changed is not None:
        was, became = (kind.__name__ if kind else "nothing" for kind in (before.get(changed), now.get(changed)))
        raise ModelError(
            f"the forward of {type(model).__name__} puts other modules in place of its own ({changed!r} was "
            f"{was} and is {became} afterwards), so that what is planned is not what trains: if it does so once, "
            "call the model once on the sample before it is distributed"
        )
