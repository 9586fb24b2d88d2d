"""`Shapes`: finds out what an operation gives, from shapes alone, so that ranks without the values agree."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from enum import Enum
from types import BuiltinFunctionType, FunctionType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from tulle.pipeline.outcome import Described, Outcome, describe, described, versioned, versions_of
from tulle.pipeline.placeholder import Placeholder
from tulle.pipeline.structure import Fixed, Spec, rebuild

_REMEMBERED = 8192
"""Outcomes of so many calls that differ."""
_UNKNOWN: Any = object()
GRADIENT = Tensor.grad.__get__  # type: ignore[attr-defined]
_NUMBERS = (Tensor.__float__, Tensor.__int__, Tensor.__complex__, Tensor.__bool__, Tensor.__index__)
"""Which a tensor is asked for within `torch.tensor([loss])`, where torch's modes are off."""
_OF_VALUES = (Tensor.__format__, GRADIENT, *_NUMBERS)
"""Which a fake tensor answers too, but not with its own gradient or number."""
_LOG_OF_FAKES = logging.getLogger("torch._subclasses.fake_tensor")
_RESIZING = (F.interpolate, F.upsample, F.fractional_max_pool2d, F.fractional_max_pool3d)
"""Whose shapes follow from a fraction."""
_BY_VALUE = (
    *(int, str, bool, bytes, complex, range, type(None), Enum, Fixed, np.integer, np.bool_),
    *(torch.dtype, torch.Size, torch.layout, torch.memory_format),
)
"""Leaves of which the value counts, not the class alone."""


class Shapes:
    """What operations were found to give, by function and by what is known of their arguments."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Outcome | None] = {}

    def outcome(self, function: Callable[..., Any], leaves: Sequence[Any], spec: Spec) -> Outcome | None:
        """What a function gives, or None if that depends on values.

        Args:
            function: Of torch, with no effect but on its arguments.
            leaves: Of its arguments `(args, kwargs)`: placeholders, tensors and whatever else.
            spec: How they are put together.
        """
        fractions = [leaf for leaf in leaves if isinstance(leaf, float)] if function in _RESIZING else ()
        key = signature((function, *fractions), leaves, spec)
        known = self._known.get(key, _UNKNOWN)
        if known is _UNKNOWN:
            known = self._known[key] = _infer(function, leaves, spec)
            if len(self._known) > _REMEMBERED:
                del self._known[next(iter(self._known))]  # the oldest
        return known


def signature(what: Hashable, leaves: Sequence[Any], spec: Spec) -> Hashable:
    """All that the outcome of a call can depend on, if not on values."""
    return what, spec, tuple([about(leaf) for leaf in leaves]), mode()


def mode() -> tuple[Hashable, ...]:
    """What outside of a call's arguments bears on its outcome."""
    usual = torch.is_grad_enabled(), torch.get_default_dtype()
    if not torch._C._is_any_autocast_enabled():
        return usual
    kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    return *usual, *((kind, torch.get_autocast_dtype(kind)) for kind in kinds)


def about(leaf: Any) -> Hashable:
    """All of a leaf that the outcome of a call can depend on, if not on values."""
    if isinstance(leaf, Placeholder):
        return leaf.described()
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), leaf.stride() if leaf.layout == torch.strided else (), leaf.dtype, leaf.requires_grad
    if isinstance(leaf, float):
        return float  # rates and temperatures change from step to step, shapes do not follow them
    if isinstance(leaf, torch.device):
        return torch.device, leaf.type  # each rank may have its own
    if isinstance(leaf, _BY_VALUE):
        return type(leaf), leaf
    if isinstance(leaf, set | frozenset):
        return type(leaf), tuple(sorted(repr(about(one)) for one in leaf))  # in one order on all ranks
    if isinstance(leaf, FunctionType | BuiltinFunctionType):
        line = leaf.__code__.co_firstlineno if isinstance(leaf, FunctionType) else 0  # hosts may have it elsewhere
        return type(leaf), leaf.__module__, leaf.__qualname__, line
    if isinstance(leaf, np.ndarray):  # of a mask, by which may be chosen, the values count
        return type(leaf), leaf.dtype.str, leaf.shape, leaf.tobytes() if leaf.dtype == bool else b""
    return type(leaf)


def writes_in_many(function: Callable[..., Any]) -> bool:
    """Whether an operation writes in each of its first argument's tensors, as `torch._foreach_mul_` does.

    Example:
        >>> writes_in_many(torch._foreach_mul_), writes_in_many(torch._foreach_norm), writes_in_many(torch.relu_)
        (True, False, False)
    """
    name = getattr(function, "__name__", "")
    return name.startswith("_foreach_") and name.endswith("_")


def _infer(function: Callable[..., Any], leaves: Sequence[Any], spec: Spec) -> Outcome | None:
    if function in _OF_VALUES or writes_in_many(function):  # fake tensors do not tell that these wrote in them
        return None
    may_write = getattr(function, "__name__", "").endswith("_")
    try:
        return _run_on_fakes(function, leaves, spec, as_leaves=not may_write)
    except Exception as error:  # depends on values, or is wrong: the rank that has the values will tell
        if may_write or "leaf" not in str(error):
            return None
    with suppress(Exception):
        return _run_on_fakes(function, leaves, spec, as_leaves=False)
    return None


def _run_on_fakes(function: Callable[..., Any], leaves: Sequence[Any], spec: Spec, *, as_leaves: bool) -> Outcome:
    """What a function gives of tensors without memory.

    Args:
        function: Of torch.
        leaves: Of its arguments.
        spec: How they are put together.
        as_leaves: Whether those that need a gradient may be leaves of autograd, in which nobody may write: those that
            may be written in take three operations each, which is more than what is asked.
    """
    fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
    with versioned(), _unheard():
        stand_ins = [_stand_in(leaf, fake_mode, is_leaf=as_leaves) for leaf in leaves]
        args, kwargs = rebuild(spec, stand_ins)
        with fake_mode:
            versions = versions_of(stand_ins)
            outcome, _ = describe(function(*args, **kwargs), stand_ins, versions)
    return replace(outcome, varies=False)  # a number that came from shapes alone


@contextmanager
def _unheard() -> Iterator[None]:
    """Without torch's own word, at level error, of shapes that do not fit: whoever has the values will tell."""
    was_disabled, _LOG_OF_FAKES.disabled = _LOG_OF_FAKES.disabled, True
    try:
        yield
    finally:
        _LOG_OF_FAKES.disabled = was_disabled


def _stand_in(leaf: Any, fake_mode: FakeTensorMode, *, is_leaf: bool) -> Any:
    if isinstance(leaf, Placeholder):
        return _fake(leaf.described(), leaf.device, fake_mode, is_leaf=is_leaf)
    if isinstance(leaf, Tensor):
        if leaf.layout != torch.strided:
            raise TypeError("shapes of sparse tensors depend on values")
        return _fake(described(leaf), leaf.device, fake_mode, is_leaf=is_leaf)
    return leaf


def _fake(known: Described, device: torch.device, fake_mode: FakeTensorMode, *, is_leaf: bool) -> Tensor:
    if is_leaf or not known.needs_grad:
        shape = torch.empty_strided(
            known.shape, known.stride, dtype=known.dtype, device="meta", requires_grad=known.needs_grad
        )
        return FakeTensor(fake_mode, shape, device)
    reach = sum(stride * max(length - 1, 0) for length, stride in zip(known.shape, known.stride, strict=True)) + 1
    # Not a leaf, so that it may be written in; its strides are as told, with gaps where a slice has some; it needs a
    # gradient under `no_grad` too, where views of it still say so.
    with torch.enable_grad(), fake_mode:
        memory = torch.empty(reach, dtype=known.dtype, device=device, requires_grad=True)
        return memory.clone().as_strided(known.shape, known.stride)
