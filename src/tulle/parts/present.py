"""`present`: while a module runs, a part stands for the whole that was gathered for it, wherever it is read from.

A module sees wholes where its parameters are. What it keeps in a list of its own, or a closure does, are the parameters
themselves, and these are parts: functions of torch are given the whole instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

_PRESENT, _BEHIND = "_tulle_present", "_tulle_behind"
"""The attributes by which a part has its whole meanwhile, and that its part."""
_OF_THE_PART = frozenset(
    {
        torch.autograd.grad,
        torch.autograd.backward,
        Tensor.backward,
        Tensor.detach,
        Tensor.requires_grad_,
        Tensor.retain_grad,
        Tensor.register_hook,
        *(getattr(vars(torch._C.TensorBase)["data"], kind) for kind in ("__get__", "__set__")),
    }
)
"""What is the parameter's own matter: its gradient, and its memory for who knows that a part lies there."""


@contextmanager
def present(parts: Sequence[nn.Parameter], wholes: Sequence[Tensor]) -> Iterator[None]:
    """Have parts stand for these wholes.

    Args:
        parts: Guarded ones.
        wholes: Of each, what was gathered.
    """
    before = [(getattr(part, _PRESENT, None), getattr(wholes[t], _BEHIND, None)) for t, part in enumerate(parts)]
    try:
        for part, whole in zip(parts, wholes, strict=True):
            setattr(part, _PRESENT, whole)
            setattr(whole, _BEHIND, part)
        yield
    finally:
        for part, whole, (earlier, behind) in zip(parts, wholes, before, strict=True):
            setattr(part, _PRESENT, earlier)
            setattr(whole, _BEHIND, behind)


def part_of(there: Tensor) -> Tensor:
    """The part that a whole stands for while a module runs; what stands for none as it is."""
    part = getattr(there, _BEHIND, None)
    return there if part is None else part


def with_wholes(
    func: Any, args: Sequence[Any], keywords: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """What a function is given, with wholes for parts that stand for them; None if it has none, or wants parts."""
    if func in _OF_THE_PART:
        return None
    found = False

    def replaced(value: Any) -> Any:
        nonlocal found
        if isinstance(value, Tensor):
            whole = getattr(value, _PRESENT, None)
            found = found or whole is not None
            return value if whole is None else whole
        if type(value) in (list, tuple):
            return type(value)(replaced(one) for one in value)
        return value

    given = tuple(map(replaced, args)), {name: replaced(value) for name, value in keywords.items()}
    return given if found else None
