"""Models that cannot be placed or profiled, refused by name: scripted, lazy, whose forward puts modules in or sends."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy

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


def refuse_lazy(model: nn.Module) -> None:
    """Raise if a parameter or buffer of a model has no shape yet.

    Raises:
        ModelError: Naming it.
    """
    for kind, named in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        for name, tensor in named:
            if is_lazy(tensor):
                raise ModelError(f"{kind} {name!r} has no shape yet (a lazy module): call the model once before")


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


@contextmanager
def refuse_sending(model: nn.Module) -> Iterator[None]:
    """Raise at the end if collectives were begun meanwhile: modules that have some do not run one by one, on one rank.

    Raises:
        ModelError: On every rank that began one.
    """
    before = _begun()
    yield
    if _begun() != before:
        raise ModelError(
            f"a {type(model).__name__} sends to other ranks when it runs, by torch.distributed, so that its modules "
            "cannot be run one by one to see what they take: say by hand what a profile would choose (a tulle.Plan, "
            "with stages where the mesh has an axis 'pipe'; along that a module runs on one rank only)"
        )


def _begun() -> dict[str, int]:
    """How many collectives of each process group this process has begun."""
    groups = cast("dict[Any, str]", dist.distributed_c10d._world.pg_names) if dist.is_initialized() else {}
    return {name: group._get_sequence_number_for_group() for group, name in groups.items()}
