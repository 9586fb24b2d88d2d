"""`untouched`: a trial run of a model leaves no trace in it.

What is left would be on the rank that tried only, and a model that goes by a counter of its own would then do something
else there than on the others.
"""

from __future__ import annotations

import copy
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tulle.generators import GENERATORS, put_back, standing
from tulle.parts import local_of
from tulle.pipeline.attributes import own_attributes
from tulle.pipeline.hooks import as_before
from tulle.pipeline.leaves import attributes_that_are_leaves
from tulle.pipeline.plain import State, held_in, is_plain, set_state, state_of


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Give gradients, buffers, hooks and attributes of modules back as they were, and what is in these.

    The same parameters are registered as before; what was written in them stays.

    Args:
        model: Whose gradients are None within.
    """
    leaves = [*model.parameters(), *(leaf for _, leaf in attributes_that_are_leaves(model))]
    gradients = [(leaf, leaf.grad) for leaf in leaves]
    undo = undoing(model)
    for leaf in leaves:
        leaf.grad = None
    try:
        with as_before(model):
            yield
    finally:
        for leaf, gradient in gradients:
            leaf.grad = gradient
        undo()


def undoing(model: nn.Module) -> Callable[[], None]:
    """What gives what is registered in modules, buffers' numbers, and attributes back as they are now."""
    buffers = [give for buffer in model.buffers() if (give := _numbers(buffer)) is not None]
    attributes = [(module, _kept(module), _registered(module)) for module in model.modules()]
    contents: list[Callable[[], object]] = []
    seen = set[int]()
    for _, kept, _ in attributes:
        for value in kept.values():
            _note_contents(value, contents, seen)

    def undo() -> None:
        for module, kept, registered in attributes:
            for name in own_attributes(module).keys() - kept.keys():
                del vars(module)[name]
            vars(module).update(kept)
            for names, before in registered:
                names.clear()
                names.update(before)
        for give in contents:
            give()
        for give in buffers:
            give()

    return undo


def _kept(module: nn.Module) -> dict[str, Any]:
    """A module's own attributes; of iterators copies, for these cannot be put back."""
    return {name: _unmoved(value) for name, value in own_attributes(module).items()}


def _registered(module: nn.Module) -> list[tuple[Any, Any]]:
    """What a module has registered, and copies of that."""
    return [(one, one.copy()) for one in (module._parameters, module._buffers, module._non_persistent_buffers_set)]


def _unmoved(value: Any) -> Any:
    if hasattr(value, "__next__"):
        with warnings.catch_warnings(action="ignore"), suppress(TypeError):  # those of itertools can be copied
            return copy.copy(value)
    return value


def _note_contents(value: Any, contents: list[Callable[[], object]], seen: set[int]) -> None:
    """Note what puts back what a value holds, and what is in that, as far as it can change."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if (give := _contents(value)) is not None:
        contents.append(give)
    for one in held_in(value):
        _note_contents(one, contents, seen)


def _contents(value: Any) -> Callable[[], object] | None:
    """What puts back what a value holds, if that can change."""
    if type(value) is Tensor:
        return _numbers(value) if value.layout == torch.strided else None
    if is_plain(value):
        return partial(_reset, value, state_of(value, is_all=True))
    if isinstance(value, list | dict | set | deque):
        return partial(_refill, value, copy.copy(value))
    if isinstance(value, GENERATORS):
        return partial(put_back, value, standing(value))
    return None


def _numbers(tensor: Tensor) -> Callable[[], None] | None:
    """What puts a tensor's numbers back, if it has some and tells that they were written."""
    if tensor.is_meta or tensor.is_inference():
        return None
    return partial(_rewrite, tensor, tensor._version, local_of(tensor).clone())


def _refill(value: Any, before: Any) -> None:
    value.clear()
    if isinstance(value, list | deque):
        value.extend(before)
    else:
        value.update(before)


def _reset(value: Any, before: State) -> None:
    set_state(value, before, state_of(value, is_all=True))


def _rewrite(value: Tensor, version: int, before: Tensor) -> None:
    if value._version != version or not _is_equal(value, before):
        with torch.no_grad():
            if value.shape != before.shape:  # observers of quantization give theirs one number a channel, in place
                value.resize_(before.shape)
            value.copy_(before)


def _is_equal(value: Tensor, before: Tensor) -> bool:
    """Whether nothing was written past the version counter, as batch norm does with its running statistics."""
    return value.layout != torch.strided or torch.equal(value, before)
