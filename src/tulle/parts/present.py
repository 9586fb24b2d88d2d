"""Functions of torch are given wholes for parts: those that are there, or such as all ranks gather for it.

A module sees wholes where its parameters are, while it runs. What it keeps in a list of its own, or a closure does, are
the parameters themselves, and these are parts, which stand for their wholes meanwhile (`present`). Where none is there,
what would take a part for the whole has it gathered (`gathered`), if what the part is of knows how to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import numpy
import torch
from torch import Tensor, nn

from tulle.parts.torch_functions import (
    DRAWS,
    DROPS,
    EACH_BY_ITSELF,
    PRODUCTS,
    is_transformed,
    name_of,
    tensors_in,
    writes,
)
from tulle.parts.wholes import PART_OF, Whole

SETS_DATA: Any = vars(torch._C.TensorBase)["data"].__set__
"""`parameter.data = ...`."""
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
        Tensor.register_post_accumulate_grad_hook,
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
    return replaced(args, keywords, lambda one: getattr(one, _PRESENT, None))


def can_gather(part: Tensor) -> bool:
    """Whether all ranks can put together what a part is of."""
    whole: Whole = getattr(part, PART_OF)
    return whole.is_gathered


def gathered(
    func: Callable[..., Any], args: Sequence[Any], keywords: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """What a function is given that would take parts for wholes, with these. Every rank that has a part must call it.

    Args:
        func: The function.
        args: Its arguments, and
        keywords: those by name.

    Returns:
        None if nobody can gather them, or the function would write in several parts, or in what autograd follows, turn
        a part in place, or draw numbers of its shape.
    """
    parts = [one for one in tensors_in([*args, *keywords.values()]) if hasattr(one, PART_OF)]
    first, *_ = (*args, *keywords.values())
    name = name_of(func)
    cannot_write = writes(func) and (name.startswith(EACH_BY_ITSELF) or not _may_be_written(func, first))
    draws = name in DRAWS and (name not in DROPS or keywords.get("inplace"))
    if cannot_write or keywords.get("out") is not None or draws or is_transformed() or not all(map(can_gather, parts)):
        return None
    with torch.set_grad_enabled(torch.is_grad_enabled() and func != SETS_DATA):
        found = {id(one): cast("Whole", getattr(one, PART_OF)).gather(one) for one in parts}
    wholes = {number: whole for number, whole in found.items() if whole is not None}
    if len(wholes) < len(found) or (func == SETS_DATA and not _are_alike(wholes[id(first)], args[1])):
        return None
    return replaced(args, keywords, lambda one: wholes.get(id(one)))


def _may_be_written(func: Any, tensor: Any) -> bool:
    is_followed = torch.is_grad_enabled() and isinstance(tensor, Tensor) and tensor.requires_grad
    return func == SETS_DATA or not (is_followed or name_of(func) in PRODUCTS)  # which turn the tensor itself


def _are_alike(tensor: Tensor, other: Tensor) -> bool:
    return tensor.shape == other.shape and tensor.dtype == other.dtype


def done_with_wholes(
    func: Callable[..., Any], args: tuple[Any, ...], keywords: Mapping[str, Any], *, instead_of: Any
) -> Any:
    """What a function gives of wholes that were gathered for it. What it writes in one is written in the part.

    An array of numpy is read-only, as what is written in that nobody sees.

    Args:
        func: The function.
        args: Its arguments, and
        keywords: those by name, with wholes.
        instead_of: What the first argument stands for, which a function that writes in it gives.
    """
    if func == SETS_DATA:
        args[0].detach().copy_(args[1])
        return None
    result = func(*args, **keywords)
    if isinstance(result, numpy.ndarray):
        result.setflags(write=False)
    return instead_of if writes(func) and result is next(iter(args), None) else result


def replaced(
    args: Sequence[Any], keywords: Mapping[str, Any], whole_of: Callable[[Tensor], Tensor | None]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Arguments with wholes for those tensors that have one; None if none has."""
    found = False

    def with_wholes_in(value: Any) -> Any:
        nonlocal found
        if isinstance(value, Tensor):
            whole = whole_of(value)
            found = found or whole is not None
            return value if whole is None else whole
        if type(value) in (list, tuple):
            return type(value)(with_wholes_in(one) for one in value)
        return value

    given = tuple(map(with_wholes_in, args)), {name: with_wholes_in(value) for name, value in keywords.items()}
    return given if found else None
