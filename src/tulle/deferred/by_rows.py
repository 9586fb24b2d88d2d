"""`ByRows`: how the values of one parameter come about, as far as that can be done for some rows at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor

from tulle.deferred.draws import Kind, can_draw_in_chunks, draw_in_chunks
from tulle.deferred.record import Call, Record, View

Change = Callable[[int, Tensor], Tensor]
"""What to do with a chunk, given its first row."""
_EMPTY = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided")
_FILLED: dict[str, float] = {"zeros": 0, "ones": 1, "new_zeros": 0, "new_ones": 1, "zeros_like": 0, "ones_like": 1}
_FILLING = ("zero_", "fill_", "copy_")
_DRAWN: dict[str, Kind] = {"randn": "normal_", "rand": "uniform_"}
_NAMES_OF_ARGUMENTS: dict[str, tuple[str, str]] = {"normal_": ("mean", "std"), "uniform_": ("from", "to")}


@dataclass(frozen=True, slots=True)
class Draw:
    """All elements of a contiguous tensor drawn at random, which can be done for some rows at a time.

    Args:
        kind: The method of a tensor.
        shape: Of the tensor.
        dtype: Of its elements.
        arguments: Of the method.
        generator: None for PyTorch's own.
    """

    kind: Kind
    shape: tuple[int, ...]
    dtype: torch.dtype
    arguments: tuple[float, ...]
    generator: torch.Generator | None

    def chunks(self, chunk_bytes: int) -> Iterator[tuple[int, Tensor]]:
        """The numbers, `(first row, [rows, ...])`."""
        return draw_in_chunks(
            self.kind, self.shape, self.dtype, self.arguments, chunk_bytes=chunk_bytes, generator=self.generator
        )


def drawn_by(call: Call) -> Draw | None:
    """What a call draws, or None if it draws nothing, or not in this way."""
    name = call.name
    if name in _DRAWN and call.results:
        kind, view, arguments = _DRAWN[name], call.results[0], ()
    elif name in _NAMES_OF_ARGUMENTS:
        kind, view, arguments = cast("Kind", name), call.arguments[0], call.arguments[1:]
    else:
        return None
    if not isinstance(view, View) or not view.shape or not _is_contiguous(view):
        return None
    is_by_name = any(word in call.keywords for word in _NAMES_OF_ARGUMENTS[kind])
    if is_by_name or not can_draw_in_chunks(kind, view.dtype, torch.Size(view.shape).numel()):
        return None
    return Draw(kind, view.shape, view.dtype, tuple(arguments), call.keywords.get("generator"))


@dataclass(slots=True)
class ByRows:
    """How the values of one memory come about.

    Args:
        view: The memory as `[rows, ...]`.
        draws: By number of the call: numbers are drawn there, even if none of them is left in the end.
        source: The call whose numbers are in the values, None if they are all given.
        changes: What was done after it, in order.
    """

    view: View
    draws: dict[int, Draw] = field(default_factory=dict)
    source: int | None = None
    changes: list[Change] = field(default_factory=list)

    def chunks(self, chunk_bytes: int) -> Iterator[tuple[int, Tensor]]:
        """The values, `(first row, [rows, ...])`."""
        if self.source is not None:
            drawn = self.draws[self.source].chunks(chunk_bytes)
        else:
            rows = max(1, chunk_bytes // max(1, self.row_elements * self.view.dtype.itemsize))
            firsts = range(0, self.view.shape[0], rows)
            shapes = ((min(rows, self.view.shape[0] - first), *self.view.shape[1:]) for first in firsts)
            drawn = zip(firsts, (torch.zeros(shape, dtype=self.view.dtype) for shape in shapes), strict=True)
        for first, chunk in drawn:
            changed = chunk
            for change in self.changes:
                changed = change(first, changed)
            yield first, changed

    @property
    def row_elements(self) -> int:
        """Elements of a row."""
        return torch.Size(self.view.shape[1:]).numel()

    def begin_anew(self, change: Change | None = None, source: int | None = None) -> None:
        """Forget what the values were: an operation overwrites all of them."""
        self.source = source
        self.changes = [] if change is None else [change]


def by_rows(record: Record, view: View) -> ByRows | str:
    """How a parameter's values come about by rows, or the name of the operation that needs the whole.

    Args:
        record: Of the model.
        view: The parameter.
    """
    if not view.shape or not _is_all(view, record.sizes_bytes[view.memory]) or view.memory in record.initial:
        return "a view"
    found = ByRows(view)
    for number, call in enumerate(record.calls):
        if view.memory in call.touched and not _follow(found, record, number, call):
            return getattr(call.function, "__name__", str(call.function))
    return found


def _follow(found: ByRows, record: Record, number: int, call: Call) -> bool:
    """Take in one call; False if it needs the whole."""
    memory = found.view.memory
    name = call.name
    if memory in call.made:
        return _made(found, number, call, name)
    target = call.arguments[0]
    if memory not in call.changed or len(call.views) != 1:
        return False  # another tensor is made of it, or it of another
    if not _is_all(target, record.sizes_bytes[memory]):
        return _fill_rows(found, target, call, name)
    if name in _NAMES_OF_ARGUMENTS:
        return _draw(found, number, call)
    if name in _FILLING and (value := _constant(call)) is not None:
        found.begin_anew(lambda _, chunk: chunk.fill_(value))
        return True
    return _pointwise(found, call)


def _made(found: ByRows, number: int, call: Call, name: str) -> bool:
    """The call that allocates the memory."""
    if name in _EMPTY:
        return True
    if name in _FILLED or name in ("full", "full_like", "new_full"):
        value = _FILLED[name] if name in _FILLED else call.arguments[1 if name != "new_full" else 2]
        found.begin_anew(lambda _, chunk: chunk.fill_(value))
        return not isinstance(value, View)
    if name in _DRAWN:
        return _draw(found, number, call)
    return False


def _draw(found: ByRows, number: int, call: Call) -> bool:
    draw = drawn_by(call)
    if draw is None or draw.dtype != found.view.dtype:
        return False
    found.draws[number] = replace(draw, shape=found.view.shape)  # it may fill the memory by another view
    found.begin_anew(source=number)
    return True


def _fill_rows(found: ByRows, target: View, call: Call, name: str) -> bool:
    """Some whole rows get one number, as the padding of an embedding does."""
    width = found.row_elements
    elements = torch.Size(target.shape).numel()
    value = _constant(call) if name in _FILLING else None
    if value is None or not _is_contiguous(target) or target.offset % width or elements % width:
        return False
    begin, end = target.offset // width, (target.offset + elements) // width

    def fill(first: int, chunk: Tensor) -> Tensor:
        chunk[max(0, begin - first) : max(0, end - first)] = value
        return chunk

    found.changes.append(fill)
    return True


def _pointwise(found: ByRows, call: Call) -> bool:
    tags = getattr(call.function, "tags", ())
    if torch.Tag.pointwise not in tags or call.is_random:
        return False
    arguments, keywords = call.arguments[1:], call.keywords
    found.changes.append(lambda _, chunk: call.function(chunk, *arguments, **keywords))
    return all(not isinstance(one, Tensor) or one.ndim == 0 for one in arguments)


def _constant(call: Call) -> Any:
    """What a fill puts in: a number, or a tensor of one."""
    value = call.arguments[1] if len(call.arguments) > 1 else 0
    is_one = value.numel() == 1 if isinstance(value, Tensor) else not isinstance(value, View)
    return value if is_one else None


def _is_all(view: object, size_bytes: int) -> bool:
    if not isinstance(view, View):
        return False
    return (
        view.offset == 0 and _is_contiguous(view) and torch.Size(view.shape).numel() * view.dtype.itemsize == size_bytes
    )


def _is_contiguous(view: View) -> bool:
    expected = 1
    for size, stride in zip(reversed(view.shape), reversed(view.stride), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
