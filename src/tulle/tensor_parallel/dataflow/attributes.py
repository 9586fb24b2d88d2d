"""What attributes are: of objects that are known, modules among them, and of tensors."""

from __future__ import annotations

import inspect
from dataclasses import replace
from functools import cached_property
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from tulle.tensor_parallel.dataflow.flow import Frame
from tulle.tensor_parallel.dataflow.operators import is_of_numbers
from tulle.tensor_parallel.dataflow.sources import stored, written
from tulle.tensor_parallel.dataflow.values import (
    Folded,
    Fused,
    Given,
    Heads,
    Known,
    Number,
    Own,
    Parts,
    Plain,
    Value,
    shape_of,
)

_ABOUT = frozenset({"shape", "dtype", "device", "ndim", "requires_grad", "is_cuda", "layout", "itemsize"})
"""Attributes of tensors that tell nothing of their values."""
_OF_TENSORS = frozenset({"T", "mT", "data", "real", "grad"})
"""Attributes that are tensors too."""


def attribute_of(frame: Frame, base: Value, name: str) -> Value:
    """What an attribute is of a value: of an object that is known, or of a tensor."""
    flow = frame.flow
    if isinstance(base, Known):
        found = member(base.value, name)
        is_module = isinstance(base.value, nn.Module) and name not in vars(base.value)
        if is_module and isinstance(found, Known) and is_computed(found.value):
            getter = getattr(found.value, "fget", getattr(found.value, "func", None))
            method = written(getter) if base.value is frame.module else None
            if method is None or not isinstance(found.value, property | cached_property):
                return flow.opaque(base)
            flow.reached.setdefault((id(base.value), method), set()).add(None)
            return frame.method(method, {})
        if isinstance(found, Number):
            flow.reads[found.owner, found.name] += 1
            return replace(found, read=flow.reads[found.owner, found.name])
        return flow.watched(base.value, name, found)
    if name == "shape" and isinstance(base, Parts | Heads | Folded):
        return shape_of(base)
    if name == "shape" and isinstance(base, Own | Fused):
        flow.escape(base)
    if name in _ABOUT or isinstance(base, Plain):
        return Plain()
    if not isinstance(base, Given):
        return flow.opaque(base)
    if base.of_layers and name in ("keys", "values"):
        return Heads(frozenset(), -3)
    is_within = base.is_within or name not in _OF_TENSORS
    return Given(base.names, base.frame, name == "layers", is_within=is_within)


def member(owner: Any, name: str) -> Value:
    """What an attribute is of a Python object."""
    if isinstance(owner, ModuleType | type):
        return Known(getattr(owner, name)) if hasattr(owner, name) else Plain()
    if type(owner).__name__ == "AttentionInterface":  # of `transformers`: whatever it gives attends
        return Known(interface)
    if name == "get" and is_of_numbers(owner):
        return Known(owner.get)
    if not isinstance(owner, nn.Module):
        return _of_object(getattr(owner, "__dict__", {}).get(name))
    if name == "__class__":  # which messages name
        return Known(type(owner))
    for kept in (owner._modules, owner._parameters, owner._buffers):
        if name in kept:
            found = kept[name]
            if found is None or isinstance(found, nn.Module):
                return Known(found, (id(owner), name))
            lengths = frozenset(found.shape)
            is_buffer = kept is owner._buffers
            return Given(frozenset(), id(owner), lengths=lengths) if is_buffer else Own(frozenset([id(owner)]))
    return _plain_member(owner, name)


def is_computed(value: object) -> bool:
    """Whether what a class has by a name is asked for what the attribute is: a property, another descriptor."""
    is_called = isinstance(value, FunctionType | MethodType | classmethod | staticmethod | type | nn.Module)
    return hasattr(type(value), "__get__") and not is_called


def _plain_member(module: nn.Module, name: str) -> Value:
    found = vars(module)[name] if name in vars(module) else inspect.getattr_static(type(module), name, None)
    if name in vars(module) or isinstance(found, int | float | str):
        if name == "training" or isinstance(found, torch.Tensor | list | dict | tuple):
            return Plain() if name == "training" else Own()
        if isinstance(found, int) and not isinstance(found, bool):
            return Number(found, id(module), name)
        if isinstance(found, nn.Module | FunctionType):
            return Known(found)
        is_fixed = isinstance(found, float | bool | str | type(None)) and name not in stored(type(module))
        return Known(found, (id(module), name)) if is_fixed else _of_object(found)
    if isinstance(found, staticmethod):
        return Known(found.__func__)
    if isinstance(found, FunctionType):
        return Known(MethodType(found, module))
    return Known(found) if is_computed(found) else Own()


def _of_object(value: Any) -> Value:
    """What an attribute is whose values may change."""
    if is_of_numbers(value):
        return Known(value)
    if isinstance(value, torch.Tensor | list | dict | tuple | set):
        return Own()
    if isinstance(value, int) and not isinstance(value, bool):
        return Plain(value)
    return Known(value) if hasattr(value, "__dict__") else Plain()


def interface(*_: object) -> None:
    """What stands for `ALL_ATTENTION_FUNCTIONS.get_interface`."""
