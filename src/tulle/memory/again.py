"""`as_given`: a forward that runs again in backward finds what it found the first time, and leaves nothing twice.

`torch.utils.checkpoint` gives it the same objects again. What it has written to them by then, keys to a cache say, and
to buffers of its module, statistics of batches say, it would read, and write once more. So it would what modules keep
in attributes from one call to the next, the frame before say, or what is set there for each. A module that was frozen
while it ran, as a discriminator is for its generator's loss, would be trained if it runs again when it is no longer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from enum import Enum
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from tulle.memory.draws import Draws
from tulle.memory.inputs import Inputs

_WRITTEN = "_tulle_written"
Place = tuple[nn.Module, str]
"""Of a buffer: the module that has it, and its name there."""
_copies: WeakKeyDictionary[nn.Module, dict[str, tuple[Tensor, int, Tensor]]] = WeakKeyDictionary()
"""Of buffers that no forward writes: which was copied, how often it had been written to by then, and the copy."""
_OF_TORCH = frozenset(vars(nn.Module())) | {"_flat_weights"}
"""Attributes that are not a module's own; a recurrent layer's list of parameters follows what is gathered for it."""


def as_given(
    module: nn.Module,
    forward: Callable[..., Any],
    inputs: Inputs,
    arguments: Sequence[Any],
    keywords: Mapping[str, Any],
) -> Callable[..., Any]:
    """A module's forward that can run again, each time on what it is given now.

    Args:
        module: Whose buffers forward may write.
        forward: To be called with these arguments the first time.
        inputs: The tensors among them, in which forward may write.
        arguments: Objects among them that hold others, such as caches, are copied for later; tensors are not.
        keywords: The same.
    """
    written = _known(module)
    buffers = {
        place: _copy_of(place, buffer, is_kept=is_written is False)
        for place, is_written in written.items()
        if (buffer := _buffer(place)) is not None and _has_values(buffer)
    }
    trained = [parameter.requires_grad for parameter in module.parameters()]
    attributes = _attributes(module)
    may_change = bool(written) or any(map(_may_change, (*arguments, *keywords.values())))
    given = _copied((tuple(arguments), dict(keywords)), {}) if may_change else None  # tensors may be parked elsewhere
    alike = _alike((*arguments, *keywords.values()))
    draws = Draws((*arguments, *keywords.values(), *(it for _, own in attributes for it in own.values())))
    has_run = False

    def run(*arguments: Any, **keywords: Any) -> Any:
        nonlocal has_run
        if has_run:
            arguments, keywords = _merged(arguments, keywords, alike) if given is None else _copied(given, {})
            arguments, keywords = inputs.as_they_were(arguments, keywords)
            lent = {place: buffer for place, buffer in buffers.items() if written[place] is not False}
            with _lent(lent), _holding(attributes), _frozen_as(module, trained), draws.again():
                return forward(*arguments, **keywords)
        has_run = True
        before = {place: _identity(place) for place in written}
        result = forward(*arguments, **keywords)
        inputs.look()
        draws.look()
        for place, is_written in written.items():
            if _identity(place) != before[place] or (is_written is None and not _is_same(place, buffers)):
                written[place] = True
            elif is_written is None and place[0].training:
                written[place] = False  # one copy does for many calls, as of a table of masks
        return result

    return run


def _alike(values: Sequence[object]) -> list[int]:
    """Of each value the number of the last that is the same object.

    `torch.utils.checkpoint` saves tensors each by itself: within hooks of saved tensors, as those of full sharding are,
    one that is given twice comes back as two. `nn.MultiheadAttention` asks whether its are one.
    """
    last = {id(value): number for number, value in enumerate(values)}
    return [last[id(value)] for value in values]


def _merged(
    arguments: Sequence[Any], keywords: Mapping[str, Any], alike: Sequence[int]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments and keywords of which those are one object again that were."""
    values = (*arguments, *keywords.values())
    merged = [values[number] for number in alike]
    return tuple(merged[: len(arguments)]), dict(zip(keywords, merged[len(arguments) :], strict=True))


def _known(module: nn.Module) -> dict[Place, bool | None]:
    """Of each buffer in a module, whether forward writes it; None while that is not known."""
    if _WRITTEN not in module.__dict__:
        places = [(owner, name) for owner in module.modules() for name in owner._buffers]
        module.__dict__[_WRITTEN] = dict.fromkeys(places)
    return module.__dict__[_WRITTEN]


def _buffer(place: Place) -> Tensor | None:
    owner, name = place
    return owner._buffers.get(name)


def _copy_of(place: Place, buffer: Tensor, *, is_kept: bool) -> Tensor:
    """A copy of a buffer; the one that was made before, if it is kept and nobody has written to the buffer since."""
    if not is_kept:
        return buffer.clone()
    owner, name = place
    copies = _copies.setdefault(owner, {})
    if name not in copies or copies[name][0] is not buffer or copies[name][1] != buffer._version:
        copies[name] = buffer, buffer._version, buffer.clone()
    return copies[name][2]


def _has_values(buffer: Tensor) -> bool:
    return not (buffer.is_meta or isinstance(buffer, FakeTensor))


def _is_same(place: Place, before: Mapping[Place, Tensor]) -> bool:
    """Whether a buffer has the values that it had: torch's batch norm writes past the counter of writes."""
    buffer = _buffer(place)
    if buffer is None or place not in before or buffer.layout != torch.strided:  # sparse ones cannot be compared
        return True
    return torch.equal(buffer, before[place])


def _identity(place: Place) -> tuple[int, int] | None:
    buffer = _buffer(place)
    return None if buffer is None else (id(buffer), buffer._version)


@contextmanager
def _lent(buffers: Mapping[Place, Tensor]) -> Iterator[None]:
    """Have copies of other values in the places of buffers."""
    own = {place: _buffer(place) for place in buffers}
    try:
        for (owner, name), buffer in buffers.items():
            owner._buffers[name] = buffer.clone()
        yield
    finally:
        for (owner, name), buffer in own.items():
            owner._buffers[name] = buffer


def _attributes(module: nn.Module) -> list[tuple[nn.Module, dict[str, Any]]]:
    """What modules hold besides parameters, buffers and each other; what is written within it stays written."""
    return [(owner, _own(owner)) for owner in module.modules()]


def _own(owner: nn.Module) -> dict[str, Any]:
    return {name: it for name, it in vars(owner).items() if name not in _OF_TORCH and not name.startswith("_tulle")}


@contextmanager
def _holding(attributes: Sequence[tuple[nn.Module, dict[str, Any]]]) -> Iterator[None]:
    """Have modules hold what they held."""
    now = [(owner, _own(owner)) for owner, _ in attributes]
    try:
        for owner, held in attributes:
            _hold(owner, held)
        yield
    finally:
        for owner, held in now:
            _hold(owner, held)


def _hold(owner: nn.Module, held: Mapping[str, Any]) -> None:
    for name in _own(owner).keys() - held.keys():
        del vars(owner)[name]
    vars(owner).update(held)


@contextmanager
def _frozen_as(module: nn.Module, trained: Sequence[bool]) -> Iterator[None]:
    """Have those of a module's parameters be trained that were when it ran first."""
    others = [one for one, was in zip(module.parameters(), trained, strict=False) if one.requires_grad != was]
    try:
        for parameter in others:
            parameter.requires_grad = not parameter.requires_grad
        yield
    finally:
        for parameter in others:
            parameter.requires_grad = not parameter.requires_grad


def _may_change(value: object) -> bool:
    """Whether a value is an object that holds others, which code may set; of tensors it is not asked here."""
    if isinstance(value, tuple):
        return any(map(_may_change, value))
    if isinstance(value, list | dict | set):
        return True
    return hasattr(value, "__dict__") and not (callable(value) or isinstance(value, Tensor | Enum))


def _copied(value: Any, known: dict[int, Any]) -> Any:
    """A value with copies of all that may change in it; tensors, modules and functions are the same.

    Args:
        value: Of any kind.
        known: Copies by the identity of what they are of.
    """
    if not _may_change(value):
        return value
    if id(value) in known:
        return known[id(value)]
    if isinstance(value, tuple):
        items = [_copied(item, known) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    copied = known[id(value)] = copy(value)
    if isinstance(value, list):
        copied[:] = [_copied(item, known) for item in value]
    elif isinstance(value, dict):
        dict.update(copied, {key: _copied(item, known) for key, item in value.items()})
    if hasattr(copied, "__dict__"):
        vars(copied).update({name: _copied(item, known) for name, item in vars(value).items()})
    return copied
