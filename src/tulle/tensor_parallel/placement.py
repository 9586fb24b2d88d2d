"""`Placement`: which part of one parameter lies on this rank, and how the parts make up the whole again.

A fused parameter has sections, each of which is cut for itself, so that every rank gets its share of each:

    in_proj_weight   | q0 q1 q2 q3 | k0 k1 k2 k3 | v0 v1 v2 v3 |      sections (4, 4, 4), 2 ranks
    rank 0           | q0 q1 | k0 k1 | v0 v1 |
    rank 1           | q2 q3 | k2 k3 | v2 v3 |

A section that does not divide evenly is cut as `torch.tensor_split` does: the first ranks have one more.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tulle.comm import enter, gather, meet_to_read, number_of_all
from tulle.mesh import Axis
from tulle.parts import (
    Assembled,
    CutOnce,
    Reduction,
    Whole,
    guard,
    is_followed,
    load_part,
    local_of,
    one_whole,
    tell_shape,
    whole_of,
    write_through,
)

_PLACEMENTS = "_tulle_placements"
"""The attribute by which a module holds the placements of its own parameters."""
_gives_parts: ContextVar[bool] = ContextVar("gives parts", default=False)


@dataclass(frozen=True, slots=True)
class Placement:
    """How one parameter is cut over the ranks of an axis.

    Args:
        axis: Whose ranks hold the parts.
        dim: The dimension that is cut.
        shape: Of the whole parameter.
        sections: Lengths of the sections along `dim`, which add up to its length.
    """

    axis: Axis
    dim: int
    shape: torch.Size
    sections: tuple[int, ...]

    def lengths(self, rank: int) -> list[int]:
        """The length of each section's part on one rank."""
        return [length_on(rank, section, self.axis.size) for section in self.sections]

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Of this rank's part."""
        length = sum(self.lengths(self.axis.rank))
        return (*self.shape[: self.dim], length, *self.shape[self.dim + 1 :])

    def stretches(self) -> list[tuple[int, int, int]]:
        """Of each section: where this rank's part of it begins in the whole and in the part, and its length."""
        found: list[tuple[int, int, int]] = []
        section_begin = begin = 0
        for section, length in zip(self.sections, self.lengths(self.axis.rank), strict=True):
            before = sum(length_on(rank, section, self.axis.size) for rank in range(self.axis.rank))
            found.append((section_begin + before, begin, length))
            section_begin, begin = section_begin + section, begin + length
        return found

    def part(self, whole: Tensor) -> Tensor:
        """This rank's part, in memory of its own."""
        return self._taken(local_of(whole)).clone(memory_format=torch.contiguous_format)

    def lent_part(self, whole: Tensor, *, label: str) -> Tensor:
        """This rank's part of a whole, whose gradient is that of all ranks. Every rank of the axis must call it."""
        return self._taken(enter(whole, self.axis, label=label))

    def _taken(self, whole: Tensor) -> Tensor:
        sections = whole.split(list(self.sections), self.dim)
        parts = [section.tensor_split(self.axis.size, self.dim)[self.axis.rank] for section in sections]
        return torch.cat(parts, self.dim)

    @torch.no_grad()
    def whole(self, part: Tensor, *, label: str) -> Tensor:
        """The whole, from all ranks' parts. Every rank of the axis must call it."""
        every = [self.lengths(rank) for rank in range(self.axis.size)]
        gathered = gather_uneven(local_of(part), [sum(lengths) for lengths in every], self.axis, self.dim, label=label)
        parts = gathered.split([length for lengths in every for length in lengths], self.dim)
        by_section = [parts[number :: len(self.sections)] for number in range(len(self.sections))]
        return torch.cat([part for section in by_section for part in section], self.dim)

    def __deepcopy__(self, memo: object) -> Placement:
        """A copied model's parts lie where the model's do; a process group cannot be copied."""
        return self


def length_on(rank: int, length: int, ranks: int) -> int:
    """Of a length that is cut among some ranks, how much lies on one of them.

    Example:
        >>> [length_on(rank, 10, 4) for rank in range(4)]
        [3, 3, 2, 2]
    """
    return length // ranks + (rank < length % ranks)


def gather_uneven(part: Tensor, lengths: list[int], axis: Axis, dim: int, *, label: str) -> Tensor:
    """All ranks' parts end to end, whose lengths may differ; the gradient, equal on all ranks, is cut again.

    Every rank of the axis must call it. Parts are padded to the longest: a row or two.
    """
    longest = max(lengths)
    if part.shape[dim] < longest:
        padding = [*part.shape]
        padding[dim] = longest - part.shape[dim]
        part = torch.cat([part, part.new_zeros(padding)], dim)
    gathered = gather(part, axis, dim=dim, label=label)
    if min(lengths) == longest:
        return gathered
    parts = [gathered.narrow(dim, rank * longest, length) for rank, length in enumerate(lengths)]
    return torch.cat(parts, dim)


def place(module: nn.Module, name: str, placement: Placement) -> None:
    """Note that a module's parameter is a part; its `state_dict` is whole from now on, and whole ones can be loaded."""
    if _PLACEMENTS not in module.__dict__:
        module.__dict__[_PLACEMENTS] = {}
        module.register_state_dict_post_hook(_give_wholes)
        module.register_load_state_dict_pre_hook(_take_parts)
    module.__dict__[_PLACEMENTS][name] = placement


def placements_of(module: nn.Module) -> Mapping[str, Placement]:
    """The placements of a module's own parameters, by their name in it."""
    return module.__dict__.get(_PLACEMENTS, {})


def placements(model: nn.Module) -> dict[str, Placement]:
    """How each parameter that is cut is cut, by its name in the model; the others are whole on every rank.

    What clips gradients by their norm, or writes an optimizer's state, needs to know it. A tied parameter is there
    under each of its names.

    Example:
        >>> import torch
        >>> placements(torch.nn.Linear(2, 3))
        {}
    """
    return dict(_named_placements(model))


@dataclass(frozen=True, slots=True)
class _Split(CutOnce):
    """A parameter of which a rank has its part."""

    name: str
    placement: Placement

    @property
    def dims(self) -> list[int]:
        """The one along which it is cut."""
        return [self.placement.dim]

    @property
    def local_shape(self) -> Sequence[int]:
        """Of the part."""
        return self.placement.local_shape

    def assemble(self, part: Tensor, dim: int) -> Assembled | None:
        """Section after section, without a gradient, of which each rank would have all."""
        placement, shape = self.placement, [*part.shape]
        if is_followed(part):
            return None
        shape[dim] = placement.shape[placement.dim]
        meet_to_read(self.name, placement.axis)
        made = replace(placement, dim=dim, shape=torch.Size(shape))
        return made.whole(part, label=f"all of {self.name}"), made.part

    def refusal(self, taker: str) -> str:
        """Names the parameter, its shapes, and the mend."""
        placement = self.placement
        return (
            f"{taker} was given {self.name!r} as if all of it were here, but axis {placement.axis.name!r} splits it: "
            f"this rank has {list(placement.local_shape)} of {list(placement.shape)}. Do it before tulle.distribute, "
            "or within torch.no_grad(), leave the layer out of Plan.tensor_parallel, or take its .to_local(), which is "
            "this rank's part"
        )

    @property
    def shape(self) -> torch.Size:
        """Of the layer's."""
        return self.placement.shape

    @property
    def axes(self) -> list[Axis]:
        """The one over which it is shared out."""
        return [self.placement.axis]

    @property
    def count(self) -> int:
        """Of all ranks."""
        return self.placement.shape.numel()

    def held(self) -> None:
        """Everywhere."""

    @property
    def layout(self) -> Hashable:
        """Where it is cut."""
        placement = self.placement
        return placement.axis.name, placement.dim, tuple(placement.shape), placement.sections

    def over(self, number: Tensor, op: Reduction) -> Tensor:
        """Over the axis."""
        return number_of_all(number, op, self.placement.axis, self.name)

    def refusal_of_gradient(self) -> None:
        """That of the part is given."""


@dataclass(frozen=True, slots=True)
class _SplitAgain:
    """A parameter of which a rank has its part of a part, over another axis."""

    split: _Split
    inner: Whole

    @property
    def dims(self) -> list[int]:
        """Those along which both cut it."""
        return [*self.inner.dims, *self.split.dims]

    @property
    def shape(self) -> torch.Size:
        """Of the layer's."""
        return self.split.shape

    @property
    def axes(self) -> list[Hashable]:
        """Both."""
        return [*self.inner.axes, *self.split.axes]

    @property
    def count(self) -> int:
        """Of all ranks of both axes."""
        return self.split.count

    def held(self) -> None:
        """Everywhere."""

    @property
    def layout(self) -> Hashable:
        """Where both cut it."""
        return self.split.layout, self.inner.layout

    def over(self, number: Tensor, op: Reduction) -> Tensor:
        """Over both axes."""
        return self.split.over(self.inner.over(number, op), op)

    @property
    def is_gathered(self) -> bool:
        """As the part is."""
        return self.inner.is_gathered

    def gather(self, part: Tensor) -> Tensor | None:
        """All of it, over one axis after the other, without a gradient. Every rank of both must call it."""
        found = None if is_followed(part) else self.inner.gather(part)
        return None if found is None else self.split.gather(found)

    def gather_along(self, part: Tensor, dim: int) -> Tensor | None:
        """None: what became of it is cut along two dimensions."""

    def refusal(self, taker: str) -> str:
        """That of the part."""
        return self.inner.refusal(taker)

    def refusal_of_gradient(self) -> str | None:
        """That of the part."""
        return self.inner.refusal_of_gradient()


def guard_parts(model: nn.Module) -> None:
    """Guard parameters of which this rank has a part, from now on: only layers that are split take them as they are."""
    guarded: set[int] = set()
    for name, placement in placements(model).items():
        parameter = model.get_parameter(name)
        if parameter.is_meta:  # it lives at another stage of a pipeline
            tell_shape(parameter, placement.shape)
        elif id(parameter) not in guarded:
            inner, split = whole_of(parameter), _Split(name, placement)
            guard(parameter, split if inner is None else _SplitAgain(split, inner))
            guarded.add(id(parameter))


@contextmanager
def state_of_parts() -> Iterator[None]:
    """Within this context `state_dict()` of split models gives this rank's parts, and sends nothing."""
    token = _gives_parts.set(True)
    try:
        yield
    finally:
        _gives_parts.reset(token)


def _named_placements(model: nn.Module) -> Iterator[tuple[str, Placement]]:
    for path, module in model.named_modules(remove_duplicate=False):
        for name, placement in placements_of(module).items():
            yield f"{path}.{name}" if path else name, placement


def _give_wholes(module: nn.Module, state: dict[str, Any], prefix: str, _: object) -> None:
    for name, placement in placements_of(module).items() if not _gives_parts.get() else ():
        key, parameter = prefix + name, module._parameters.get(name)
        if key in state and parameter is not None:
            part = state[key].full_tensor() if hasattr(state[key], "full_tensor") else state[key]
            if part.is_meta:  # lives at another stage of a pipeline
                state[key] = part.new_empty(placement.shape)
            elif part.shape != placement.shape:  # within a step of stages it stands for the whole
                one_whole(parameter, state, key, partial(_whole, part, placement, key))


def _whole(part: Tensor, placement: Placement, key: str) -> Tensor:
    return write_through(placement.whole(part, label=f"state_dict {key}"), part, placement.part)


def _take_parts(module: nn.Module, state: dict[str, Any], prefix: str, *others: Any) -> None:
    for name, placement in placements_of(module).items():
        part, value = module._parameters.get(name), state.get(prefix + name)
        is_part = isinstance(value, Tensor) and value.shape == placement.local_shape  # shared out further, it may be
        if part is not None and not is_part and part.shape != placement.shape:
            load_part(part, prefix + name, state, others[-1], shape=placement.shape, take=placement.part)
