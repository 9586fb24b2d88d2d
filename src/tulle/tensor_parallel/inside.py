"""`inside`: the forward of a split module knows that it has parts, and is to meet none of their guard."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from tulle.derived import put_before
from tulle.parts import lift, lower
from tulle.tensor_parallel.placement import placements_of

_WITHIN = "_tulle_parts_within"
"""The attribute by which a module holds those in it that have parts."""


class _Inside(nn.Module):
    """What a module's class gains: within its forward parts are plain tensors."""

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        """As before."""
        lifted = lift(_parameters(self))
        lent = _lent(self)
        try:
            for owner, name, whole in lent:
                owner._parameters[name] = _part(owner, name, whole)  # pyright: ignore[reportArgumentType]
            return super().forward(*arguments, **keywords)
        finally:
            for owner, name, whole in lent:
                owner._parameters[name] = whole  # pyright: ignore[reportArgumentType]
            lower(lifted)


def _parameters(module: nn.Module) -> list[Tensor | None]:
    """As they are now: `torch.func.functional_call` lends others."""
    found: list[Tensor | None] = [*module._parameters.values()]
    for one in module.__dict__[_WITHIN]:
        found += one._parameters.values()
    return found


def _lent(module: nn.Module) -> list[tuple[nn.Module, str, Tensor]]:
    """Wholes in the places of parts, as `torch.func.functional_call` lends them: where they are, and their names."""
    return [
        (owner, name, lent)
        for owner in (module, *module.__dict__[_WITHIN])
        for name, placement in placements_of(owner).items()
        if (lent := owner._parameters.get(name)) is not None and lent.shape == placement.shape
    ]


def _part(owner: nn.Module, name: str, whole: Tensor) -> Tensor:
    return placements_of(owner)[name].lent_part(whole, label=f"{name} of a {type(owner).__name__}")


def inside(module: nn.Module) -> None:
    """Have parts be plain tensors, of a class without a guard, while a module's forward runs.

    Args:
        module: Which has parts, or whose rule says how those in it are used.
    """
    module.__dict__[_WITHIN] = tuple(one for one in module.modules() if one is not module and placements_of(one))
    put_before(_Inside, module)
