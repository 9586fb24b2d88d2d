"""`own_attributes`: what hangs on a module that torch has not put there: what a forward may keep."""

from __future__ import annotations

from typing import Any

from torch import nn

_OF_TORCH = frozenset(vars(nn.Module()))
"""Attributes that every module has."""


def own_attributes(module: nn.Module) -> dict[str, Any]:
    """A module's attributes, without its parameters, buffers, submodules and hooks.

    Example:
        >>> module = nn.Linear(2, 2, bias=False)
        >>> module.calls = 3
        >>> own_attributes(module)
        {'in_features': 2, 'out_features': 2, 'calls': 3}
    """
    return {name: value for name, value in vars(module).items() if name not in _OF_TORCH}
