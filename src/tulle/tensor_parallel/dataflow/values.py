"""What is known of the values in a forward, as `flow` follows them: which of them a rank would have a part of.

x                            Given: an argument, or made of arguments alone
up(x)                        Parts: a rank's features of what a column layer would give
.view(*shape, -1, width)     Heads: the same, by heads
attend(q, k, v)              Heads, and the weights of attention
down(Parts)                  Own, as anything else that is whole on every rank
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn


@dataclass(frozen=True, slots=True)
class Known:
    """A Python object as it is: a module, a function, a number.

    Args:
        value: The object.
        read: The attribute of a module that it is, by identity and name, if it may be another one later.
    """

    value: Any
    read: tuple[int, str] | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Number:
    """A number that an attribute of a module is, such as how many heads it has.

    Args:
        value: The number.
        owner: The module, by identity.
        name: Of the attribute.
        read: The how manieth time it is read.
    """

    value: int
    owner: int
    name: str
    read: int = 0


@dataclass(frozen=True, slots=True)
class Plain:
    """A number, a shape, a dtype, an object without tensors that are trained: nothing that is a tensor.

    Args:
        number: Which it is, if it is one that is made of attributes as they are now.
        of: Numbers that it is made of.
        is_made: Whether it is made of others, and so perhaps of no length that anything has.
    """

    number: int | None = None
    of: frozenset[int] = frozenset()
    is_made: bool = False


@dataclass(frozen=True, slots=True)
class Own:
    """Whole on every rank, and made of more than arguments.

    Args:
        layers: Those of which it is a parameter, by identity, and a part where the layer is split.
    """

    layers: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Given:
    """Made of arguments of a forward alone, and of buffers and what functions of numbers give: these have no gradient.

    Args:
        names: Of the arguments; none where only others are in it.
        frame: Whose forward takes them, by identity.
        of_layers: Whether it is what a cache keeps of its layers.
        is_aligned: Whether it is an argument whose dimensions are where they were.
        lengths: Those of buffers in it, and numbers that it was made with.
        is_within: Whether it is of an object or a mapping that is an argument, and so does not enter with it.
    """

    names: frozenset[str]
    frame: int
    of_layers: bool = False
    is_aligned: bool = False
    lengths: frozenset[int] = frozenset()
    is_within: bool = False


@dataclass(frozen=True, slots=True)
class Parts:
    """A rank's part of the features, the last dimension.

    Args:
        layers: The column layers that it comes from, by identity.
        is_fresh: Whether it is what one layer gives, as it is, whose sections nobody has told yet.
    """

    layers: frozenset[int]
    is_fresh: bool = False


@dataclass(frozen=True, slots=True)
class Heads:
    """Something of each of a rank's heads, of four dimensions: its queries, its scores.

    Args:
        layers: The column layers that it comes from, by identity; what a cache had has none.
        dim: That of the heads, from the end: -2 next to their features, -3 where attention wants it.
        is_weights: Whether it is what they attend to, which a program may be given.
    """

    layers: frozenset[int]
    dim: int
    is_weights: bool = False


@dataclass(frozen=True, slots=True)
class Folded:
    """Something of each of a rank's heads, of three dimensions: samples and heads are one, samples first.

    Args:
        layers: The column layers that it comes from, by identity.
        dim: That of samples and heads, from the end: -3 where attention wants it, -2 next to their features.
        is_weights: Whether it is what they attend to.
    """

    layers: frozenset[int]
    dim: int = -3
    is_weights: bool = False


@dataclass(frozen=True, slots=True)
class Fused:
    """Several things of each of a rank's heads that one layer gives, such as queries, keys and values.

    Args:
        layers: The column layer that they come from, by identity, and its sections.
        dims: What each dimension is: `s` for which of them, `h` for heads, `d` for their features, `.` for others.
        of: The section, or the layer, of each.
    """

    layers: frozenset[int]
    dims: str
    of: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Length:
    """How many features, or heads, a rank has: another number than that of the whole.

    Args:
        layers: The column layers that they come from, by identity.
    """

    layers: frozenset[int]


@dataclass(frozen=True, slots=True)
class Several:
    """A tuple or list."""

    items: tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class Spread:
    """What is unpacked within a tuple, a list, or a call: how many values is not known."""

    value: Value


@dataclass(frozen=True, slots=True)
class Attend:
    """A function that attends: of `transformers`' interface, which takes the module first, or torch's."""

    takes_module: bool


Value = Known | Number | Plain | Own | Given | Parts | Heads | Folded | Fused | Length | Several | Spread | Attend
Split = Parts | Heads | Folded | Fused | Length


def leaves(value: Value) -> Iterator[Value]:
    """A value, or all that is in it."""
    if isinstance(value, Several):
        for item in value.items:
            yield from leaves(item)
    elif isinstance(value, Spread):
        yield from leaves(value.value)
    else:
        yield value


def layers_of(values: Sequence[Value]) -> frozenset[int]:
    """The column layers that values come from."""
    return frozenset().union(*(one.layers for value in values for one in leaves(value) if isinstance(one, Split)))


def is_split(value: Value) -> bool:
    """Whether a value has something in it of which a rank has a part."""
    return any(isinstance(one, Split) for one in leaves(value))


def is_bare(value: Value) -> bool:
    """Whether a value has no tensor in it."""
    return all(isinstance(one, Known | Number | Plain | Attend) for one in leaves(value))


def number_of(value: Value) -> int | None:
    """The number that a value is, as the code or attributes say it now; None for what is none, or not known."""
    found = value.number if isinstance(value, Plain) else value.value if isinstance(value, Known | Number) else None
    return found if isinstance(found, int) and not isinstance(found, bool) else None


def numbers_in(values: Sequence[Value]) -> frozenset[int]:
    """All numbers in some values, and that they are made of."""
    found = [one for value in values for one in leaves(value)]
    own = frozenset(number for one in found if (number := number_of(one)) is not None)
    return own.union(*(one.of for one in found if isinstance(one, Plain)))


def trained(value: Value) -> list[nn.Module]:
    """All modules in a value that have parameters, as what is called with them may use these."""
    held = [one.value for one in leaves(value) if isinstance(one, Known)]
    owners = [getattr(one, "__self__", one) for one in held]
    modules = [module for owner in owners if isinstance(owner, nn.Module) for module in owner.modules()]
    return [module for module in modules if module._parameters]


def given_by(values: Sequence[Value]) -> Given | None:
    """What is made of arguments, some at least, and of nothing that has a tensor else; None for other values."""
    found = [one for value in values for one in leaves(value) if not is_bare(one)]
    given = [one for one in found if isinstance(one, Given)]
    frames = {one.frame for one in given if one.names} or {one.frame for one in given[:1]}
    if len(given) < len(found) or len(frames) != 1:
        return None
    names, lengths = (
        frozenset().union(*some) for some in zip(*((one.names, one.lengths) for one in given), strict=True)
    )
    said = numbers_in([one for value in values for one in leaves(value) if not isinstance(one, Known)])
    return Given(names, frames.pop(), lengths=lengths | said, is_within=any(one.is_within for one in given))


def shape_of(value: Parts | Heads | Folded) -> Several:
    """The lengths of what a rank has a part of: of heads, four; of features, of as many dimensions as there are."""
    length = Length(value.layers)
    if isinstance(value, Parts):
        return Several((Spread(Plain()), length))
    count = 3 if isinstance(value, Folded) else 4
    return Several(tuple(length if dim == value.dim else Plain() for dim in range(-count, 0)))
