"""What Python's operators give of values, and what an index takes."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Sequence
from types import FunctionType, MethodType, ModuleType

from torch import nn

from tulle.tensor_parallel.dataflow.values import (
    Attend,
    Known,
    Plain,
    Several,
    Spread,
    Value,
    leaves,
    number_of,
    numbers_in,
)

SOME = object()
"""A slice whose bounds are not known."""
SIMPLE = int | float | str | type(None)


def is_told(base: Several, place: slice) -> bool:
    """Whether some items are known of several; of those after what is unpacked only the last can be left out."""
    spread = [number for number, one in enumerate(base.items) if isinstance(one, Spread)]
    after = len(base.items) - 1 - spread[-1] if spread else 0
    return not spread or (place.start is None and place.step is None and -after <= (place.stop or 0) < 0)


def lengths_taken(place: Value) -> frozenset[int]:
    """Lengths of the stretches that an index takes, as the code says them."""
    found = place.items if isinstance(place, Several) else [place]
    slices = [one.value for one in found if isinstance(one, Known) and isinstance(one.value, slice)]
    ends = [(one.start or 0, one.stop or 0) for one in slices]
    return frozenset(number for first, last in ends for number in (last, -first, last - first) if number > 1)


def is_stretches(place: Value) -> bool:
    """Whether an index takes stretches of dimensions, and leaves all where they are."""
    return all(map(is_stretch, place.items if isinstance(place, Several) else [place]))


def is_stretch(place: Value) -> bool:
    """Whether an index takes a stretch of one dimension."""
    return isinstance(place, Known) and (place.value is SOME or isinstance(place.value, slice))


def is_of_numbers(value: object) -> bool:
    """Whether it is a dictionary of numbers and texts, as configurations have; an empty one may be filled later."""
    return isinstance(value, dict) and bool(value) and all(isinstance(one, SIMPLE) for one in value.values())


def truth(value: Value) -> bool | None:
    """Whether a test holds, if the code and the module's attributes say so."""
    if isinstance(value, Known) and isinstance(
        value.value, SIMPLE | nn.Module | FunctionType | MethodType | ModuleType
    ):
        return bool(value.value) if isinstance(value.value, SIMPLE) else True
    return None


def compared(values: Sequence[Value], operators: Sequence[ast.cmpop]) -> Value:
    """What `is` says of two objects."""
    if len(values) == 2 and all(isinstance(one, Known) for one in values):
        first, second = (one.value for one in values if isinstance(one, Known))
        return Known((first is second) == isinstance(operators[0], ast.Is))
    return Plain()


def pieces(value: Value) -> Sequence[Value]:
    """What a tuple adds to another."""
    return value.items if isinstance(value, Several) else [Spread(value)]


_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: int.__add__,
    ast.Sub: int.__sub__,
    ast.Mult: int.__mul__,
    ast.FloorDiv: lambda one, other: one // other if other else 0,
    ast.Mod: lambda one, other: one % other if other else 0,
    ast.Pow: lambda one, other: one**other if 0 <= other < _LARGEST else 0,
}
_LARGEST = 64
"""Power of which the number is told."""
_OF_ITEMS = frozenset(
    ["as_tensor", "asarray", "cat", "concat", "concatenate", "hstack", "new_tensor", "stack", "tensor"]
)
"""Functions, and methods, whose result has a length that is the number of items, or a multiple."""
_OF_SHAPES = frozenset(["broadcast_to", "expand", "rearrange", "repeat", "reshape", "tile", "unflatten", "view"])
"""Those that are given lengths of the result."""


def lengths_made(name: str, given: Sequence[Value], keywords: Iterable[Value] = ()) -> list[Value]:
    """Lengths that a function, or a method, of a name gives its result, by numbers or items that the code says."""
    said = [one for value in (*given, *keywords) for one in leaves(value)]
    numbers = [number for one in said if (number := number_of(one)) is not None]
    if name in ("arange", "range") and len(given) == len(numbers) in (2, 3) and numbers[-1]:
        return [Plain(len(range(*numbers)))]
    if name in _OF_ITEMS:
        return [Plain(len(one.items)) for one in given if isinstance(one, Several)]
    return [Plain(number) for number in numbers if number > 1] if name in _OF_SHAPES else []


def calculated(operator: ast.operator, left: Value, right: Value) -> Value:
    """What an operator gives of numbers."""
    numbers = [number_of(one) for one in (left, right)]
    calculate = _OPERATORS.get(type(operator))
    of = numbers_in([left, right])
    if isinstance(operator, ast.Div) and numbers[0] and numbers[1] and numbers[0] % numbers[1] == 0:
        of |= {numbers[0] // numbers[1]}
    if calculate is None or numbers[0] is None or numbers[1] is None:
        return Plain(of=of, is_made=True)
    found = calculate(numbers[0], numbers[1])
    return Known(found) if isinstance(left, Known) and isinstance(right, Known) else Plain(found, of, is_made=True)


def equal(values: Sequence[Value], operator: ast.cmpop) -> Value:
    """What a comparison says of two that are known."""
    first, second = (one.value for one in values if isinstance(one, Known))
    if isinstance(operator, ast.Eq | ast.NotEq):
        return Known((first == second) == isinstance(operator, ast.Eq))
    return Plain()


def has_in_it(value: Value, part: Value) -> bool:
    """Whether a value is another, or has it somewhere in it."""
    if isinstance(value, Spread):
        return has_in_it(value.value, part)
    return value is part or (isinstance(value, Several) and any(has_in_it(one, part) for one in value.items))


def item_of_object(base: Known, place: Value) -> Value | None:
    """An item of an object that is known."""
    if isinstance(base.value, nn.ModuleDict) and isinstance(place, Known):
        return Known(base.value._modules.get(place.value))
    return Attend(takes_module=True) if type(base.value).__name__ == "AttentionInterface" else None
