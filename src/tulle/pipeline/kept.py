"""What the forward of a placed module leaves on itself for others: a loss of experts, features, a number of calls.

One process reads such an attribute when the forward is over. So it is a result like any other, and stands on every rank
as a placeholder until the module runs again, which has the tensors of its own in their places on its rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from tulle.pipeline.attributes import own_attributes
from tulle.pipeline.filled import fill
from tulle.pipeline.held import is_as_before
from tulle.pipeline.objects import taken, told
from tulle.pipeline.outcome import Again, Constant, Described, Left, Outcome, describe, is_fixed
from tulle.pipeline.placeholder import Placeholder
from tulle.pipeline.structure import Spec, flatten, rebuild
from tulle.traits import makes_weights

Place = tuple[str, str]
"""The path of a module from the placed one, and the name of an attribute."""
Content = tuple[Sequence[Any], Spec]
"""What `flatten` makes of what is there, which may be filled later."""
StandFor = Callable[[Described, Tensor | None], Placeholder]


@dataclass(frozen=True, slots=True)
class _Shown:
    """What stands in a place, on the rank of the module.

    Args:
        value: For all to see.
        own: What the module itself has left there.
        leaves: Of the value, and
        spec: how these were put together; somebody may change what is in a list since.
        tensors: What the leaves stand for.
    """

    value: object
    own: object
    leaves: Sequence[Any]
    spec: Spec
    tensors: Sequence[Any]

    def follow(self) -> None:
        """Do to the module's own list or dictionary what was done to the one that all see."""
        leaves, spec = flatten(told(self.value))
        if not _is_same((self.leaves, self.spec), leaves, spec):
            pairs = zip(self.leaves, self.tensors, strict=True)
            tensors = {id(leaf): tensor for leaf, tensor in pairs if isinstance(leaf, Placeholder)}
            fill(self.own, taken(rebuild(spec, [tensors.get(id(leaf), leaf) for leaf in leaves])))


class Attributes:
    """The attributes of a placed module, in some of which its forward leaves tensors.

    Args:
        module: The module.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._shown: dict[Place, _Shown] = {}

    @contextmanager
    def of_its_own(self) -> Iterator[None]:
        """Within it, on its rank, the module sees what it left, and nothing that stands for it."""
        for shown in self._shown.values():
            shown.follow()
        self._put({place: (shown.own, shown.value) for place, shown in self._shown.items()})
        try:
            yield
        finally:
            self._put({place: (shown.value, shown.own) for place, shown in self._shown.items()})

    def all(self) -> dict[Place, Content]:
        """What is there, but for what torch's hooks make of parameters."""
        return {
            (path, name): flatten(value)
            for path, module in self._module.named_modules()
            if not makes_weights(module)
            for name, value in own_attributes(module).items()
        }

    def show(self, left: Left, results: Sequence[Any], stand_for: StandFor, *, is_here: bool) -> None:
        """Put what stands for what a call left in its place.

        Args:
            left: By the call, as all ranks know it.
            results: The leaves of what the call gave, as all ranks see them.
            stand_for: Makes a placeholder of a description, and of the tensor where it is.
            is_here: Whether the module lives on this rank.
        """
        attributes = vars(self._module.get_submodule(left.path))
        own, shown = attributes.get(left.attribute), self._shown.get((left.path, left.attribute))
        if shown is not None and own is shown.value:  # the call has not set it anew
            own = shown.own
        there = _as_told(own, left) if is_here else [None] * len(left.leaves)
        leaves: list[Any] = []
        for leaf, tensor in zip(left.leaves, there, strict=True):
            if isinstance(leaf, Again):
                leaves.append(results[leaf.result])
            elif isinstance(leaf, Described):
                leaves.append(stand_for(leaf, tensor))
            else:
                assert isinstance(leaf, Constant), "an argument is told as any tensor"
                leaves.append(leaf.value)
        attributes[left.attribute] = value = taken(rebuild(left.spec, leaves))
        if is_here:
            self._shown[left.path, left.attribute] = _Shown(value, own, leaves, left.spec, there)

    def _put(self, pairs: Mapping[Place, tuple[object, object]]) -> None:
        """Put the first of each pair where the second is."""
        for (path, name), (first, second) in pairs.items():
            attributes = vars(self._module.get_submodule(path))
            if attributes.get(name) is second:
                attributes[name] = first


def left_by(
    before: Mapping[Place, Content], after: Mapping[Place, Content], results: Sequence[Any]
) -> tuple[Left, ...]:
    """What a call has put in attributes: of tensors those with fractions, and numbers.

    Args:
        before: All that was there.
        after: All that is there.
        results: The leaves of what the call gave.
    """
    numbers = {id(result): number for number, result in enumerate(results) if isinstance(result, Tensor)}
    found: list[Left] = []
    for (path, name), (leaves, spec) in after.items():
        if _is_same(before.get((path, name)), leaves, spec):
            continue
        leaves, spec = flatten(told(rebuild(spec, list(leaves))))  # objects that are new; in others nobody looks
        if not all(map(_can_be_told, leaves)):
            continue
        if any(map(_is_worth_telling, leaves)):
            described = describe(tuple(leaves), (), ())[0].results
            left = (
                Again(numbers[id(leaf)]) if id(leaf) in numbers else one
                for leaf, one in zip(leaves, described, strict=True)
            )
            found.append(Left(path, name, tuple(left), spec))
    return tuple(found)


def _is_same(before: Content | None, leaves: Sequence[Any], spec: Spec) -> bool:
    if before is None or before[1] is not spec:
        return False
    return all(map(is_as_before, before[0], leaves))


def _is_worth_telling(leaf: object) -> bool:
    if isinstance(leaf, Tensor):
        return leaf.is_floating_point() or leaf.is_complex()
    return isinstance(leaf, int | float) and not isinstance(leaf, bool)


def with_left(outcome: Outcome, left: Sequence[Left]) -> Outcome:
    """The outcome with what the call left; numbers in it come from the data."""
    leaves = [leaf for one in left for leaf in one.leaves]
    varies = any(isinstance(leaf, Constant) and not is_fixed(leaf.value) for leaf in leaves)
    return replace(outcome, left=tuple(left), varies=outcome.varies or varies)


def _can_be_told(leaf: object) -> bool:
    if isinstance(leaf, Tensor):
        return not isinstance(leaf, nn.Parameter) and leaf.layout == torch.strided
    return isinstance(leaf, int | float | torch.Size) or is_fixed(leaf)


def _as_told(value: object, left: Left) -> list[Any]:
    """The leaves of what is there; None for a tensor that is not as was told."""
    leaves, spec = flatten(told(value))
    if spec is not left.spec:
        return [None] * len(left.leaves)
    described = describe(tuple(leaves), (), ())[0].results
    return [
        leaf if isinstance(one, Described) and isinstance(now, Described) and now.is_like(one) else None
        for leaf, now, one in zip(leaves, described, left.leaves, strict=True)
    ]
