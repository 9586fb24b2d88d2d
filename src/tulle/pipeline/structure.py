"""Takes the arguments and results of calls apart into leaves, and puts them together again.

Tuples, named ones too, dictionaries and whatever else is registered with `torch.utils._pytree` (Hugging Face's
`ModelOutput` is), plain dataclasses and slices are taken apart; everything else is a leaf.
"""

from __future__ import annotations

import contextlib
import dataclasses
import operator
from dataclasses import dataclass
from enum import Enum
from functools import cache
from threading import Lock
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.utils._pytree as pytree


@dataclass(frozen=True, slots=True, eq=False)
class Leaf:
    """The place of one leaf."""

    def __reduce__(self) -> str:
        """There is one."""
        return "LEAF"


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Node:
    """How a container was made: its type, what its flatten function gave beside the children, and these.

    Made by `node`, once for what is the same, so that structures are compared by identity: they are part of what every
    call is looked up by. One that is not kept is the same as long as somebody holds it.
    """

    kind: type
    context: Any
    children: tuple[Spec, ...]
    is_kept: bool = True

    def __reduce__(self) -> tuple[Any, ...]:
        """Be the same again where it is sent or copied."""
        return node, (self.kind, self.context, self.children)


_nodes: dict[Any, Node] = {}
_passing: WeakValueDictionary[Any, Node] = WeakValueDictionary()
"""Those in which a dictionary's keys are objects: a model's own, perhaps, which would be held as long as we run."""
_one_at_a_time = Lock()


def node(kind: type, context: Any, children: tuple[Spec, ...]) -> Node:
    """The one of that kind, context and children."""
    key = kind, context, children
    known = _nodes.get(key)
    if known is not None:
        return known
    if _is_of_names(context) and all(not isinstance(child, Node) or child.is_kept for child in children):
        return _nodes.setdefault(key, Node(kind, context, children))
    with _one_at_a_time:
        known = _passing.get(key)
        if known is None:
            _passing[key] = known = Node(kind, context, children, is_kept=False)
        return known


def _is_of_names(context: Any) -> bool:
    """Whether there is no more in a context than names, numbers and classes."""
    if isinstance(context, tuple):
        return all(map(_is_of_names, context))
    if isinstance(context, _List | _Dictionary):
        return all(map(_is_of_names, context.items))
    return isinstance(context, _NAMES)


class Fixed:
    """A leaf that says what is meant, and is the same on all ranks and whenever a call comes again."""

    __slots__ = ()


Spec = Leaf | Node
LEAF = Leaf()
_NAMES = (str, bytes, int, float, complex, bool, type(None), type, torch.dtype, torch.device, Enum)
ATOMS = (torch.Tensor, int, float, str, bool, type(None), torch.dtype, torch.device, Fixed)
"""Leaves that hold nothing else."""
LEAF_KINDS: set[type] = {torch.Tensor, torch.nn.Parameter, int, float, str, bool, type(None), torch.dtype, torch.device}
"""Classes of most leaves; only to look at them the sooner."""


def flatten(value: object) -> tuple[list[Any], Spec]:
    """The leaves of a value, in order, and what puts them together again.

    Example:
        >>> leaves, spec = flatten(({"a": 1}, slice(0, 2)))
        >>> leaves
        [1, 0, 2, None]
        >>> rebuild(spec, leaves)
        ({'a': 1}, slice(0, 2, None))
    """
    leaves: list[Any] = []
    return leaves, _flatten(value, leaves)


def flatten_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Spec]:
    """`flatten((args, kwargs))`, sooner where all of these are leaves."""
    leaves = [*args, *kwargs.values()]
    if not LEAF_KINDS.issuperset(map(type, leaves)):
        return flatten((args, kwargs))
    return leaves, _of_leaves(len(args), tuple(kwargs))


@cache
def _of_leaves(count: int, names: tuple[str, ...]) -> Spec:
    spec = flatten(((None,) * count, dict.fromkeys(names)))[1]
    _FLAT[spec] = count, names
    return spec


def rebuild_call(spec: Spec, leaves: list[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """`rebuild(spec, leaves)` of what `flatten_call` took apart, sooner where all of the arguments are leaves."""
    known = _FLAT.get(spec)
    if known is None:
        return rebuild(spec, leaves)
    count, names = known
    return tuple(leaves[:count]), dict(zip(names, leaves[count:], strict=True))


_FLAT: dict[Spec, tuple[int, tuple[str, ...]]] = {}
"""Of calls whose arguments are all leaves, how many and which have names."""


def can_flatten(value: object) -> bool:
    """Whether a value is taken apart, or stays a leaf."""
    return _flatten(value, []) is not LEAF


def is_atom(value: object) -> bool:
    """Whether a leaf holds nothing else."""
    return isinstance(value, ATOMS)


def rebuild(spec: Spec, leaves: list[Any]) -> Any:
    """The value of that structure with other leaves."""
    return leaves[0] if spec is LEAF else _rebuild(spec, iter(leaves))


def _flatten(value: Any, leaves: list[Any]) -> Spec:
    kind = type(value)
    if kind in LEAF_KINDS:
        leaves.append(value)
        return LEAF
    if kind is tuple or kind is list:
        return node(kind, None, tuple([_flatten(child, leaves) for child in value]))
    if not isinstance(value, ATOMS):
        if kind is dict:
            return node(kind, tuple(value), tuple([_flatten(child, leaves) for child in value.values()]))
        if kind in pytree.SUPPORTED_NODES:
            children, context = pytree.SUPPORTED_NODES[kind].flatten_fn(value)
            return node(kind, _frozen(context), tuple([_flatten(child, leaves) for child in children]))
        if issubclass(kind, tuple) and _is_only_a_tuple(value):  # named, and what is derived of such (PackedSequence)
            return node(kind, None, tuple([_flatten(child, leaves) for child in value]))
        if kind is slice:
            ends = (value.start, value.stop, value.step)
            # A bound that is a tensor is asked for its number here, on every rank.
            bounds = [operator.index(end) if isinstance(end, torch.Tensor) else end for end in ends]
            return node(kind, None, tuple([_flatten(bound, leaves) for bound in bounds]))
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            held = held_by(value)
            return node(kind, tuple(held), tuple([_flatten(child, leaves) for child in held.values()]))
    leaves.append(value)
    return LEAF


def _is_only_a_tuple(value: Any) -> bool:
    """Whether a tuple of some class is made of its items alone."""
    return hasattr(value, "_fields") or not (isinstance(value, torch.Size) or getattr(value, "__dict__", None))


def held_by(value: Any) -> dict[str, Any]:
    """What a dataclass's instance holds, by name, and not what its class makes of asking for it, which may raise."""
    held = dict(vars(value)) if hasattr(value, "__dict__") else {}
    for field in dataclasses.fields(value):
        with contextlib.suppress(AttributeError):  # it was not set
            held[field.name] = object.__getattribute__(value, field.name)
    return held


def _rebuild(spec: Spec, leaves: Any) -> Any:
    if spec is LEAF:
        return next(leaves)
    assert isinstance(spec, Node), "a leaf or a node"
    children = [_rebuild(child, leaves) for child in spec.children]
    kind = spec.kind
    if kind is tuple or kind is list:
        return kind(children)
    if kind is dict:
        return dict(zip(spec.context, children, strict=True))
    if kind in pytree.SUPPORTED_NODES:
        return pytree.SUPPORTED_NODES[kind].unflatten_fn(children, _thawed(spec.context))
    if kind is slice:
        return slice(*children)
    if issubclass(kind, tuple):
        return tuple.__new__(kind, children)  # past a constructor that checks what it is given
    made = object.__new__(kind)
    for name, child in zip(spec.context, children, strict=True):
        object.__setattr__(made, name, child)  # frozen dataclasses too
    return made


@dataclass(frozen=True, slots=True)
class _List:
    """A list within a context, as something that can be hashed."""

    items: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class _Dictionary:
    """A dictionary within a context, as that of a TensorDict is one."""

    items: tuple[tuple[Any, Any], ...]


def _frozen(context: Any) -> Any:
    if isinstance(context, list):
        return _List(tuple(map(_frozen, context)))
    if type(context) is dict:
        return _Dictionary(tuple((key, _frozen(value)) for key, value in context.items()))
    return context


def _thawed(context: Any) -> Any:
    if isinstance(context, _List):
        return list(map(_thawed, context.items))
    if isinstance(context, _Dictionary):
        return {key: _thawed(value) for key, value in context.items}
    return context
