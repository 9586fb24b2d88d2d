"""What calls give, for `forward`: of modules, of functions, and of methods of tensors, as far as they are known."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules import activation, dropout

from tulle.tensor_parallel.dataflow.attributes import interface, is_computed, member
from tulle.tensor_parallel.dataflow.entering import MASKS
from tulle.tensor_parallel.dataflow.flow import Flow, Frame
from tulle.tensor_parallel.dataflow.methods import DRAWING, said_in_call
from tulle.tensor_parallel.dataflow.norms import of_norm
from tulle.tensor_parallel.dataflow.notes import Attention
from tulle.tensor_parallel.dataflow.operators import SIMPLE, is_of_numbers, lengths_made
from tulle.tensor_parallel.dataflow.patterns import rearranged
from tulle.tensor_parallel.dataflow.products import PRODUCTS, multiplied, repeated, softened, summed
from tulle.tensor_parallel.dataflow.shapes import chunked, flat, of_three, unbound, viewed
from tulle.tensor_parallel.dataflow.sources import (
    by_name,
    is_called_plainly,
    looks_at_last,
    positional,
    written,
)
from tulle.tensor_parallel.dataflow.stretches import concatenated, split_along
from tulle.tensor_parallel.dataflow.values import (
    Attend,
    Folded,
    Fused,
    Given,
    Heads,
    Known,
    Length,
    Number,
    Own,
    Parts,
    Plain,
    Several,
    Spread,
    Value,
    is_bare,
    is_split,
    layers_of,
    leaves,
    trained,
)
from tulle.tensor_parallel.registry import factory_of
from tulle.tensor_parallel.splitter import computes_linear

_ACTIVATIONS = {
    "CELU": "celu",
    "ELU": "elu",
    "GELU": "gelu",
    "Hardshrink": "hardshrink",
    "Hardsigmoid": "hardsigmoid",
    "Hardswish": "hardswish",
    "Hardtanh": "hardtanh",
    "LeakyReLU": "leaky_relu",
    "LogSigmoid": "logsigmoid",
    "Mish": "mish",
    "ReLU": "relu",
    "ReLU6": "relu6",
    "SELU": "selu",
    "SiLU": "silu",
    "Sigmoid": "sigmoid",
    "Softplus": "softplus",
    "Softshrink": "softshrink",
    "Softsign": "softsign",
    "Tanh": "tanh",
    "Tanhshrink": "tanhshrink",
}
"""Classes of `torch.nn`, and functions of its `functional`, that treat each number by itself."""
_ELEMENTWISE = ("abs", "clamp", "exp", "maximum", "minimum", "relu", "sigmoid", "sqrt", "square", "tanh", "where")
"""Functions of `torch` that do."""
_MODULES = frozenset([nn.Identity, *(getattr(activation, name) for name in _ACTIVATIONS)])
_FUNCTIONS = frozenset(
    [*(getattr(functional, name) for name in _ACTIVATIONS.values()), *(getattr(torch, name) for name in _ELEMENTWISE)]
)
_CALLABLE = FunctionType | MethodType | BuiltinFunctionType | type
_HARMLESS = (isinstance, len, hasattr, type, callable, id, issubclass)
_TEXTS = (ascii, format, repr, str)
"""Those that say what a value is."""
PEEKING = (eval, exec, locals, vars, inspect.currentframe, sys._getframe)
"""Those that come to the variables of who calls them."""
_OF_NUMBERS = frozenset(
    [int, float, bool, min, max, round, abs, range, divmod, pow, torch.finfo, torch.iinfo, torch.Size]
)
"""Those that make no tensors of numbers."""
_SHAPES = {
    torch.chunk: chunked,
    torch.split: split_along,
    torch.reshape: partial(viewed, is_method=False),
    torch.unbind: unbound,
}
"""Functions of `torch` that do what methods of the same names do."""
_TURNS = ("apply_rotary", "apply_multimodal_rotary", "rotate_half", "rotate_every_two")
"""How the names of functions begin that turn queries and keys by their positions, each head by itself."""
_PRODUCTS = tuple(getattr(torch, name) for name in PRODUCTS)
_DROPOUTS = (functional.dropout, torch.dropout)
_IN_PIECES = "apply_chunking_to_forward"
"""A function of `transformers` that calls its first argument with those after the third, in pieces of the samples."""


def call(frame: Frame, function: Value, arguments: Sequence[Value], keywords: Mapping[str, Value]) -> Value:
    """What a call of a function or a module gives."""
    flow, everything = frame.flow, [*flat(arguments), *keywords.values()]
    if isinstance(function, Attend):
        return _attended(frame, function, flat(arguments), keywords)
    if not isinstance(function, Known):
        flow.opaque(function, *everything)
        return Own()
    called = function.value
    if not isinstance(called, nn.Module | _CALLABLE) and not type(called).__module__.startswith("torch"):
        flow.opaque(function, *everything)  # an object that may know what is trained
        return Own()
    if isinstance(called, nn.Module):
        if any(map(is_split, everything)) and not _is_linear(called):  # another may be in its place later
            flow.decide(function)
        return _of_module(frame, called, flat(arguments), keywords)
    if isinstance(called, MethodType) and called.__self__ is frame.module and called.__func__ is not called:
        return _of_method(frame, called.__func__, flat(arguments), keywords)
    return _of_function(frame, called, flat(arguments), keywords)


def attends(function: Value) -> bool:
    """Whether a function attends, to what it is given by name or after queries, keys and values."""
    is_torchs = isinstance(function, Known) and function.value is functional.scaled_dot_product_attention
    return is_torchs or isinstance(function, Attend)


def iterated(value: Value) -> Sequence[Value] | None:
    """What one goes through in a loop, if it is known one by one."""
    if isinstance(value, Several):
        return None if any(isinstance(one, Spread) for one in value.items) else value.items
    if isinstance(value, Known) and isinstance(value.value, nn.ModuleList | nn.Sequential):
        return [Known(child) for child in value.value]
    return None


def items_of(flow: Flow, base: Value, place: int | slice) -> Sequence[Value] | None:
    """What there is to take from."""
    if isinstance(base, Several) and len(base.items) == 2 and isinstance(base.items[1], Length):
        return of_three(flow, base, place)
    return iterated(base)


def _of_module(frame: Frame, module: nn.Module, given: Sequence[Value], keywords: Mapping[str, Value]) -> Value:
    flow, values = frame.flow, [*given, *keywords.values()]
    is_patched = "forward" in vars(module) or not is_called_plainly(type(module))
    if is_patched or _is_hooked(module):
        return flow.opaque(Known(module), *values)
    if _is_linear(module) and len(values) == 1:
        return flow.called(module, values[0])
    if getattr(module, "inplace", False):
        _change(flow, values)
    if type(module) is dropout.Dropout and len(values) == 1:
        return flow.dropped(values[0], module, is_none=not module.p)
    if _is_elementwise(module) and len(values) == 1:
        return flow.elementwise(values[0])
    if len(values) == 1 and (found := of_norm(frame, module, values[0])) is not None:
        return found
    bound = _bound(module, given, keywords)
    if bound is not None:
        split = {name: value for name, value in bound.items() if is_split(value)}
        others = [value for value in bound.values() if not is_split(value)]
        found = frame.within(module, split, is_bare=all(map(is_bare, bound.values())))
        if found is not None:
            flow.escape(*others)
            return _seen_from_outside(frame, found)
    return flow.pure(Known(module), *values)


def _is_hooked(module: nn.Module) -> bool:
    """Whether hooks see what goes into a module and what comes out, or the gradients of these."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def _seen_from_outside(frame: Frame, value: Value) -> Value:
    """What another module's forward gave: made of its arguments, it is anything to this one."""
    if isinstance(value, Several):
        return Several(tuple(_seen_from_outside(frame, one) for one in value.items))
    if is_split(value) or is_bare(value):
        return value
    frame.flow.escape(value)
    return Own()


def _is_linear(module: nn.Module) -> bool:
    return computes_linear(module) and factory_of(module) is not None


def _is_elementwise(module: nn.Module) -> bool:
    of_transformers = type(module).__module__ == "transformers.activations"
    return (type(module) in _MODULES or of_transformers) and next(module.parameters(), None) is None


def _bound(module: nn.Module, given: Sequence[Value], keywords: Mapping[str, Value]) -> dict[str, Value] | None:
    """Arguments by name; what is unpacked is by no name."""
    names = positional(inspect.signature(module.forward).parameters.values())
    if any(isinstance(one, Spread) for one in given) or len(given) > len(names):
        return None
    return dict(zip(names, given, strict=False)) | dict(keywords)


def filled(
    parameters: Sequence[inspect.Parameter], given: Sequence[Value], keywords: Mapping[str, Value]
) -> dict[str, Value] | None:
    """What a function's parameters are, of these arguments; None if something split comes by no name that it has."""
    places, names = positional(parameters), by_name(parameters)
    others = [one for name, one in keywords.items() if name not in names]
    if any(isinstance(one, Spread) for one in given) or len(given) > len(places) or any(map(is_split, others)):
        return None
    values: dict[str, Value] = {one.name: Own() for one in parameters}
    if "**" not in keywords:
        values |= {one.name: Known(one.default) for one in parameters if isinstance(one.default, SIMPLE)}
    return (
        values | dict(zip(places, given, strict=False)) | {name: keywords[name] for name in names if name in keywords}
    )


def _of_method(frame: Frame, function: FunctionType, given: Sequence[Value], keywords: Mapping[str, Value]) -> Value:
    """What a method of the module itself gives: the arguments go on in it."""
    values = filled([*inspect.signature(function).parameters.values()][1:], given, keywords)
    method = written(function)
    if values is None or method is None:
        return frame.flow.opaque(Known(frame.module), *given, *keywords.values())
    frame.flow.reach(frame.module, function, method)
    return frame.method(method, values)


def _of_function(frame: Frame, function: Any, given: Sequence[Value], keywords: Mapping[str, Value]) -> Value:
    flow, values, name = frame.flow, [*given, *keywords.values()], getattr(function, "__name__", "")
    of_python = _of_python(frame, function, given, keywords)
    if of_python is not None:
        return of_python
    if keywords.get("inplace", Known(False)) != Known(False) or (name.endswith("_") and not name.endswith("__")):
        _change(flow, values)
    if function is interface:
        return Plain() if any(_reads_trained(frame.module, one) for one in given) else Attend(takes_module=True)
    if function is nn.Softmax and len(values) == 1 and isinstance(values[0], Known):
        made = nn.Softmax(values[0].value)
        flow.owners[id(made)] = made  # while its identity is noted
        return Known(made)
    if function is functional.scaled_dot_product_attention:
        return _attended(frame, Attend(takes_module=False), given, keywords)
    if name == _IN_PIECES and len(given) > 3:
        return call(frame, given[0], given[3:], {})
    if isinstance(function, MethodType):
        return flow.opaque(Known(function), *values)
    may_draw = not (getattr(function, "__module__", None) or "torch").startswith("torch") or name.startswith(DRAWING)
    found = _of_tensors(frame, function, given, keywords)
    if found is None and any(map(is_split, values)):
        found = frame.function(function, given, keywords)
    if found is None and getattr(function, "__closure__", None):  # over a parameter, perhaps
        return flow.opaque(*values)
    return found or flow.pure(*values, *lengths_made(name, given, keywords.values()), may_draw=may_draw)


def _of_python(frame: Frame, function: Any, given: Sequence[Value], keywords: Mapping[str, Value]) -> Value | None:
    """What functions of Python give, which make no tensors."""
    flow, values = frame.flow, [*given, *keywords.values()]
    if function is len and len(given) == 1 and isinstance(given[0], Several):
        return Known(len(given[0].items)) if iterated(given[0]) is not None else Plain()
    if function is len and any(isinstance(one, Folded) for one in given):
        return flow.opaque(*values)
    if any(function is one for one in (*_HARMLESS, *_TEXTS)):
        flow.escape(*(one for one in values if function in _TEXTS and not is_bare(one)))
        return Plain()
    is_of_dict = is_of_numbers(getattr(function, "__self__", None))
    is_of_math = getattr(function, "__module__", "") == "math" or function in _OF_NUMBERS
    if all(map(is_bare, values)) and (is_of_dict or is_of_math):
        return flow.plain(*values, *lengths_made(getattr(function, "__name__", ""), given), Plain(is_made=True))
    if function is super:
        return flow.opaque(Known(frame.module))
    if function is getattr and len(given) > 1 and all(isinstance(one, Known) for one in given[:2]):
        owner, named = (one.value for one in given[:2] if isinstance(one, Known))
        found = member(owner, named)
        if isinstance(found, Number):
            flow.reads[found.owner, found.name] += 1
        is_called = isinstance(found, Known) and (is_computed(found.value) or isinstance(found.value, MethodType))
        return flow.opaque(given[0]) if is_called else found
    if function is zip and all(items := [iterated(one) for one in given]):
        return Several(tuple(map(Several, zip(*(one or () for one in items), strict=False))))
    if function is enumerate and given and (items := iterated(given[0])) is not None:
        return Several(tuple(Several((Known(number), item)) for number, item in enumerate(items)))
    return None


def _change(flow: Flow, values: Sequence[Value]) -> None:
    """Values are written to: who gave them sees it."""
    flow.escape(*(one for value in values for one in leaves(value) if isinstance(one, Given)))


def _reads_trained(module: nn.Module, function: Value) -> bool:
    """Whether a function that is given a module has a name that is one of something trained in it."""
    names = (
        function.value.__code__.co_names
        if isinstance(function, Known) and isinstance(function.value, FunctionType)
        else ()
    )
    held = {*module._parameters, *(name for name, child in module._modules.items() if trained(Known(child)))}
    return not held.isdisjoint(names)


def _of_tensors(frame: Frame, function: Any, given: Sequence[Value], keywords: Mapping[str, Value]) -> Value | None:
    """What a function of tensors gives, if it is known."""
    flow, name = frame.flow, getattr(function, "__name__", "")
    if any(function is one for one in _DROPOUTS) and given:
        share = keywords.get("p", given[1] if len(given) > 1 else Plain())
        if is_split(given[0]):
            flow.decide(share)
        return flow.dropped(given[0], None, is_none=isinstance(share, Known) and not share.value)
    is_of_two = function in (torch.max, torch.min) and len(given) == 2 and not is_bare(given[1])
    if (function in _FUNCTIONS and given) or is_of_two:
        return flow.elementwise(*given, *keywords.values())
    is_einops = name == "rearrange" and (getattr(function, "__module__", None) or "").startswith("einops")
    if given and is_split(given[0]) and (function in _SHAPES or is_einops):
        return _of_shapes(frame, function, given, keywords)
    if function in _PRODUCTS and len(given) == 2:
        return multiplied(frame, given[0], given[1])
    if name == "einsum" and not keywords and any(map(is_split, given)):
        return summed(frame, given, is_einops=function is not torch.einsum)
    if function in (functional.softmax, torch.softmax) and given:
        return softened(given[0], keywords.get("dim", given[1] if len(given) > 1 else Plain()))
    heads = [one for value in given for one in leaves(value) if isinstance(one, Heads)]
    if not heads or len({one.dim for one in heads}) > 1:
        return None
    if name.startswith(_TURNS) and isinstance(function, FunctionType) and _turns_each(function, given, keywords):
        others = [*(one for one in given if not isinstance(one, Heads)), *keywords.values()]
        return (
            (Several(tuple(heads)) if len(heads) > 1 else heads[0])
            if flow.meets(others, heads, is_aligned=False)
            else None
        )
    return _of_heads(frame, function, given, keywords)


def _of_shapes(frame: Frame, function: Any, given: Sequence[Value], keywords: Mapping[str, Value]) -> Value | None:
    """What a function of torch or einops gives that changes a shape."""
    arguments, named = said_in_call(frame.flow, given, keywords)
    if function not in _SHAPES:
        return rearranged(frame, given[0], given[1] if len(given) == 2 else Plain(), named)
    first = given[0] if isinstance(given[0], Parts | Heads | Folded | Fused) else None
    return _SHAPES[function](frame, first, arguments[1:], named) if first else None


def _turns_each(function: FunctionType, given: Sequence[Value], keywords: Mapping[str, Value]) -> bool:
    """Whether a function treats each of the heads that it is given by itself, as far as its code shows."""
    written = inspect.unwrap(function)
    names = dict(zip(inspect.signature(written).parameters, given, strict=False)) | dict(keywords)
    return looks_at_last(written, frozenset(name for name, one in names.items() if is_split(one)))


def _of_heads(frame: Frame, function: Any, given: Sequence[Value], keywords: Mapping[str, Value]) -> Value | None:
    """What a function gives of heads, in which it looks no further than into each."""
    first, *others = given
    dim = keywords.get("dim", others[0] if others else Plain())
    if function in (torch.cat, torch.concat):
        return concatenated(frame.flow, first, dim)
    if getattr(function, "__name__", "") != "repeat_kv" or not isinstance(first, Heads) or len(others) != 1:
        return None
    return repeated(frame.flow, first, others[0], function)


def _attended(frame: Frame, attend: Attend, given: Sequence[Value], keywords: Mapping[str, Value]) -> Value:
    """What attention gives: of heads, heads, next to their features where the function takes the module."""
    flow = frame.flow
    values = [*given[attend.takes_module :], *keywords.values()]
    named = [*given[attend.takes_module :]] + [keywords[name] for name in ("query", "key", "value") if name in keywords]
    three, mask = named[:3], [*named[3:4], *(keywords[name] for name in MASKS if name in keywords)]
    others = [
        *named[4:],
        *(one for name, one in keywords.items() if name not in (*MASKS, "**", "query", "key", "value")),
    ]
    heads = [one for one in three if isinstance(one, Heads) and one.dim == -3]
    if len(heads) < 3 or not heads[0].layers or not flow.meets([*mask, *others], heads):
        return flow.opaque(*values)
    layers = layers_of(heads)
    share = keywords.get("dropout", keywords.get("dropout_p", named[4] if len(named) > 4 else Known(0.0)))
    flow.decide(share)
    if not (isinstance(share, Known) and not share.value):
        flow.drawing |= layers
    queries, keys, contents = (one.layers for one in heads)
    flow.attentions.append(Attention(frame.module, queries, (keys, contents)))
    if attend.takes_module:
        return Several((Heads(layers, -2), Heads(layers, -3, is_weights=True)))
    return Heads(layers, -3)
