"""`Outcome`: what a call gives, told without its values, so that ranks which do not run it can go on."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tulle.parts import shape_told
from tulle.pipeline.structure import LEAF, Fixed, Spec, flatten


@dataclass(frozen=True, slots=True)
class Described:
    """A tensor without its values.

    Args:
        shape: Its shape.
        stride: Its strides.
        dtype: Its dtype.
        needs_grad: Whether a gradient is to come back to it.
        base: Number of the argument whose memory it shares, or None.
        kin: Number of an earlier result whose memory it shares, or None.
        layout: Of its memory; one that is not strided has no strides.
        is_of_host: Whether it is on the CPU, else on the device of its rank.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    needs_grad: bool
    base: int | None = None
    kin: int | None = None
    layout: torch.layout = torch.strided
    is_of_host: bool = False

    @property
    def nbytes(self) -> int:
        """What its elements take."""
        return math.prod(self.shape) * self.dtype.itemsize

    def is_like(self, other: Described) -> bool:
        """Whether who goes by the one is not misled about the other: strides and memory may differ."""
        return _essence(self) == _essence(other)


@dataclass(frozen=True, slots=True)
class Same:
    """A result that is one of the arguments."""

    argument: int


@dataclass(frozen=True, slots=True)
class Constant:
    """A result that is no tensor."""

    value: Any


@dataclass(frozen=True, slots=True)
class Twin:
    """A result that is the same tensor as an earlier one, by the number of that."""

    result: int


Result = Described | Same | Twin | Constant
_WITHOUT_IDENTITY = (int, float, str, bool, type(None), torch.dtype, torch.device)
_FIXED = (bool, str, type(None), torch.dtype, torch.device, type, Fixed)


@dataclass(frozen=True, slots=True)
class Again:
    """What a call leaves in an attribute and gives as a result, too, by its number among the results."""

    result: int


@dataclass(frozen=True, slots=True)
class Left:
    """What a module's call leaves in an attribute, told without its values.

    Args:
        path: Of the module that has it, from the one that was called.
        attribute: Its name.
        leaves: Of what is there.
        spec: How these are put together.
    """

    path: str
    attribute: str
    leaves: tuple[Result | Again, ...]
    spec: Spec


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a call gives.

    Args:
        results: Of each leaf of what it returns.
        spec: How these are put together.
        written: Numbers of the arguments that it wrote in.
        trained: Numbers of those among them that need a gradient since, or did before.
        marked: Numbers of the arguments that need a gradient since, but were not written in.
        varies: Whether it holds numbers that come from the data, so that it must be told at every call.
        left: What a module leaves in attributes of its own, for others to read.
    """

    results: tuple[Result, ...]
    spec: Spec
    written: tuple[int, ...] = ()
    trained: tuple[int, ...] = ()
    marked: tuple[int, ...] = ()
    varies: bool = False
    left: tuple[Left, ...] = ()

    @property
    def only(self) -> Described | None:
        """The tensor that it gives, if that is its own, and it does nothing else; as most calls do."""
        if self.spec is not LEAF or self.written or self.marked or self.left or self.varies:
            return None
        one = self.results[0]
        return one if isinstance(one, Described) and one.base is None and one.layout == torch.strided else None

    def is_like(self, other: Outcome) -> bool:
        """Whether who goes by the other is not misled about this one: strides and memory may differ.

        Without gradients so may, if this has none, whether there is one: a view says so then, and a copy does not.
        """
        if self.spec != other.spec:
            return False
        mine, theirs = list(map(_essence, self.results)), list(map(_essence, other.results))
        return mine == theirs or (not torch.is_grad_enabled() and _as_views(self.results, other.results) == theirs)


@dataclass(frozen=True, slots=True)
class Raised:
    """Instead of an outcome: what an operation raised, for all ranks to raise."""

    error: Exception


def describe(result: object, arguments: Sequence[object], versions: Sequence[int]) -> tuple[Outcome, list[Any]]:
    """The outcome of a call that was run, and the leaves of what it returned.

    Args:
        result: What it returned.
        arguments: The leaves of its arguments.
        versions: `versions_of(arguments)` from before.
    """
    leaves, spec = flatten(result)
    after = versions_of(arguments)
    written = tuple(n for n, version in enumerate(after) if version != versions[n]) if after != versions else ()
    same: dict[int, int] = {}
    memory: dict[int, int] = {}
    for number, leaf in enumerate(arguments):
        if not isinstance(leaf, _WITHOUT_IDENTITY):
            same.setdefault(id(leaf), number)
        if isinstance(leaf, Tensor) and leaf.layout == torch.strided and not leaf.is_nested:
            memory.setdefault(leaf.untyped_storage()._cdata, number)
    results: list[Result] = []
    first: dict[int, int] = {}
    of_results: dict[int, int] = {}
    for number, leaf in enumerate(leaves):
        if id(leaf) in same:
            results.append(Same(same[id(leaf)]))
        elif isinstance(leaf, Tensor) and id(leaf) in first:
            results.append(Twin(first[id(leaf)]))
        else:
            first[id(leaf)] = number
            results.append(_described(leaf, memory, of_results, number))
    varies = any(isinstance(one, Constant) and not is_fixed(one.value) for one in results)
    trained = tuple(number for number in written if getattr(arguments[number], "requires_grad", False))
    return Outcome(tuple(results), spec, written, trained, varies=varies), leaves


def is_own(result: object, only: Described, arguments: Sequence[object]) -> bool:
    """Whether what a call gave is a tensor of its own, and such a one as was known."""
    return (
        type(result) is Tensor
        and result.shape == only.shape
        and result.dtype is only.dtype
        and result.requires_grad is only.needs_grad
        and result.layout is torch.strided
        and result.is_cpu is only.is_of_host
        and id(result) not in map(id, arguments)
    )


def described(tensor: Tensor, base: int | None = None, kin: int | None = None) -> Described:
    """A tensor, by itself unless an argument or an earlier result is named whose memory it shares.

    Of what its rank has a part of the whole, as ranks of other stages know it, which have nothing of it.
    """
    stride = tensor.stride() if tensor.layout == torch.strided else ()
    shape, needs_grad = tuple(tensor.shape), tensor.requires_grad
    if type(tensor) is not Tensor and (told := shape_told(tensor)) != shape:
        shape, stride = told, torch.empty(told, device="meta").stride()
    return Described(shape, stride, tensor.dtype, needs_grad, base, kin, tensor.layout, tensor.is_cpu)


def versions_of(arguments: Sequence[object]) -> list[int]:
    """How often each argument was written in so far."""
    return [leaf._version if isinstance(leaf, Tensor) and not leaf.is_inference() else 0 for leaf in arguments]


def untrained_of(arguments: Sequence[object]) -> list[int]:
    """Numbers of the arguments that need no gradient, but could."""
    return [
        number
        for number, leaf in enumerate(arguments)
        if isinstance(leaf, Tensor) and not leaf.requires_grad and leaf.is_floating_point()
    ]


def with_marked(outcome: Outcome, arguments: Sequence[Any], untrained: Sequence[int]) -> Outcome:
    """The outcome with which of these arguments need a gradient since."""
    marked = [number for number in untrained if arguments[number].requires_grad and number not in outcome.written]
    return replace(outcome, marked=tuple(marked)) if marked else outcome


@contextmanager
def versioned() -> Iterator[None]:
    """Within it `no_grad` stands for inference mode, whose tensors do not tell how often they were written in."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(mode=False), torch.no_grad():
        yield


def _described(leaf: object, of_arguments: dict[int, int], of_results: dict[int, int], number: int) -> Result:
    if not isinstance(leaf, Tensor) or leaf.is_nested:
        return Constant(leaf)
    if leaf.layout != torch.strided:
        return described(leaf)
    memory = leaf.untyped_storage()._cdata
    base = of_arguments.get(memory)
    kin = of_results.setdefault(memory, number)
    kin = None if kin == number or base is not None else kin
    return described(leaf, base, kin)


def is_fixed(value: object) -> bool:
    """Whether a value can be taken to be the same whenever arguments of the same shapes come."""
    return isinstance(value, _FIXED)


def _essence(result: Result) -> object:
    if not isinstance(result, Described):
        return result
    return result.shape, result.dtype, result.needs_grad, result.layout


def _as_views(results: Sequence[Result], others: Sequence[Result]) -> list[object]:
    """What counts of these, with a gradient where the others have one."""
    if len(results) != len(others):
        return []
    return [
        _essence(replace(one, needs_grad=True) if isinstance(one, Described) and _has_gradient(other) else one)
        for one, other in zip(results, others, strict=True)
    ]


def _has_gradient(result: Result) -> bool:
    return isinstance(result, Described) and result.needs_grad
