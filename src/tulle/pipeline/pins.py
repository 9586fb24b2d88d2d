"""`stage`: a context in which modules are pinned to a stage when they are made."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from tulle.errors import PlanError
from tulle.pipeline.homes import outward

_pins: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
_entered: list[int] = []


@contextmanager
def stage(number: int) -> Iterator[None]:
    """Pin the modules that are made, and made part of another, within this context to a stage; the innermost wins.

    Every rank must build the model alike; nothing is sent. A partition by profile leaves pinned modules where they are.

    Args:
        number: Of the stage, from 0.

    Raises:
        PlanError: If it is no such number.

    Example:
        >>> import torch
        >>> from tulle import pipeline
        >>> model = torch.nn.Module()
        >>> with pipeline.stage(1):
        ...     model.head = torch.nn.Linear(2, 2)
        >>> pipeline.pins_of(model)
        {'head': 1}
    """
    if not isinstance(number, int) or isinstance(number, bool) or number < 0:
        raise PlanError(f"stage was given {number!r}, expected the number of a stage: 0, 1, ...")
    _entered.append(number)
    hook = register_module_module_registration_hook(_pin)
    try:
        yield
    finally:
        hook.remove()
        _entered.pop()


def pins_of(model: nn.Module) -> dict[str, int]:
    """The stages of a model's pinned modules by name, without those within one that is pinned alike."""
    found: dict[str, int] = {}
    for name, module in model.named_modules():
        around = next((found[outer] for outer in outward(name) if outer in found), None)
        if module in _pins and _pins[module] != around:
            found[name] = _pins[module]
    return found


def _pin(module: nn.Module, name: str, submodule: nn.Module | None) -> None:
    if submodule is not None:
        _pins.setdefault(submodule, _entered[-1])
