"""What the forward of a placed module leaves on itself for others: a loss of experts, features, a number of calls.

One process reads such an attribute when the forward is over. So it is a result like any other, and stands on every rank
as a placeholder until the module runs again, which has the tensors of its own in their places on its rank.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from tulle.errors import ModelError
from tulle.pipeline.attributes import own_attributes
from tulle.pipeline.filled import fill
from tulle.pipeline.held import is_as_before
from tulle.pipeline.objects import content_of, with_content
from tulle.pipeline.outcome import Again, Constant, Described, Left, Outcome, Twin, describe, is_fixed
from tulle.pipeline.placeholder import Placeholder
from tulle.pipeline.plain import is_plain, set_state, state_of
from tulle.pipeline.structure import Spec, flatten
from tulle.traits import makes_weights

Place = tuple[str, str]
"""The path of a module from the placed one, and the name of an attribute."""
Content = tuple[Sequence[Any], Spec]
"""What `flatten` makes of what is there, which may be filled later."""
StandFor = Callable[[Described, Tensor | None], Placeholder]
_AS_IT_IS = nullcontext()


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
        leaves, spec = content_of(self.value)
        if not _is_same((self.leaves, self.spec), leaves, spec):
            pairs = zip(self.leaves, self.tensors, strict=True)
            tensors = {
                id(leaf): tensor for leaf, tensor in pairs if tensor is not None and isinstance(leaf, Placeholder)
            }
            now = with_content(spec, [tensors.get(id(leaf), leaf) for leaf in leaves])
            if is_plain(self.own) and type(now) is type(self.own):
                set_state(self.own, state_of(now), state_of(self.own))
            else:
                fill(self.own, now)


class Attributes:
    """The attributes of a placed module, in some of which its forward leaves tensors.

    Args:
        module: The module.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.shown: dict[Place, _Shown] = {}
        self.shared: Mapping[int, Any] = {}
        """Lists, dictionaries and objects that hang on modules of other ranks too, or on such as are not placed."""
        self.note: Callable[[str, nn.Module, str], None] = _nothing
        """Told of the path of a module and it, and the name of an attribute, before that is set for all to see."""

    def of_its_own(self) -> AbstractContextManager[None]:
        """Within it, on its rank, the module sees what it left, and nothing that stands for it."""
        return self._seeing_its_own() if self.shown else _AS_IT_IS

    @contextmanager
    def _seeing_its_own(self) -> Iterator[None]:
        for shown in self.shown.values():
            shown.follow()
        self._put({place: (shown.own, shown.value) for place, shown in self.shown.items()})
        try:
            yield
        finally:
            self._put({place: (shown.value, shown.own) for place, shown in self.shown.items()})

    def all(self) -> dict[Place, Content]:
        """What is there, but for what torch's hooks make of parameters; not in objects that hang at several places."""
        values = {
            (path, name): value
            for path, module in self._module.named_modules()
            if not makes_weights(module)
            for name, value in own_attributes(module).items()
        }
        places = Counter(map(id, values.values()))
        return {
            place: content_of(value) if places[id(value)] == 1 and not _is_account(value) else flatten(value)
            for place, value in values.items()
        }

    def with_left(self, outcome: Outcome, before: Mapping[Place, Content], results: Sequence[Any]) -> Outcome:
        """The outcome of a call with what the call has left.

        Args:
            outcome: Without that.
            before: All that was there.
            results: The leaves of what the call gave.
        """
        after = self.all()
        self._check_shared(before, after)
        return _with_left(outcome, _left_by(before, after, results))

    def _check_shared(self, before: Mapping[Place, Content], after: Mapping[Place, Content]) -> None:
        """Refuse that a call puts what is trained into what modules of other ranks have, too, and would not see.

        Args:
            before: All that was there.
            after: All that is there.
        """
        for (path, name), (leaves, spec) in after.items():
            value = vars(self._module.get_submodule(path))[name]
            if self.shared.get(id(value)) is not value or _is_same(before.get((path, name)), leaves, spec):
                continue
            if any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves):
                where = f"{path}.{name}" if path else name
                raise ModelError(
                    f"a forward puts a tensor that needs a gradient into its attribute {where!r}, a "
                    f"{type(value).__name__} that modules of other stages, or around it, have too, and would not see "
                    "it: give it to the module as an argument, or place the model by a profile (sample=)"
                )

    def show(self, left: Left, results: Sequence[Any], stand_for: StandFor, *, is_here: bool) -> None:
        """Put what stands for what a call left in its place.

        Args:
            left: By the call, as all ranks know it.
            results: The leaves of what the call gave, as all ranks see them.
            stand_for: Makes a placeholder of a description, and of the tensor where it is.
            is_here: Whether the module lives on this rank.
        """
        self.note(left.path, module := self._module.get_submodule(left.path), left.attribute)
        attributes = vars(module)
        own, shown = attributes.get(left.attribute), self.shown.get((left.path, left.attribute))
        if shown is not None and own is shown.value:  # the call has not set it anew
            own = shown.own
        there = _as_told(own, left) if is_here else [None] * len(left.leaves)
        leaves: list[Any] = []
        for leaf, tensor in zip(left.leaves, there, strict=True):
            if isinstance(leaf, Again):
                leaves.append(results[leaf.result])
            elif isinstance(leaf, Twin):
                leaves.append(leaves[leaf.result])
            elif isinstance(leaf, Described):
                leaves.append(stand_for(leaf, tensor))
            else:
                assert isinstance(leaf, Constant), "an argument is told as any tensor"
                leaves.append(leaf.value)
        attributes[left.attribute] = value = with_content(left.spec, leaves)
        if is_here:
            self.shown[left.path, left.attribute] = _Shown(value, own, leaves, left.spec, there)

    def _put(self, pairs: Mapping[Place, tuple[object, object]]) -> None:
        """Put the first of each pair where the second is."""
        for (path, name), (first, second) in pairs.items():
            attributes = vars(self._module.get_submodule(path))
            if attributes.get(name) is second:
                attributes[name] = first


def _nothing(*_: object) -> None:
    pass


def shared_in(model: nn.Module, ranks: Mapping[str, int]) -> dict[int, Any]:
    """Lists, dictionaries and objects that hang on modules of several ranks, by identity.

    Args:
        model: That is placed.
        ranks: Of its placed modules, by name; all other modules are on each rank.
    """
    at = {inner: rank for name, rank in ranks.items() for inner in model.get_submodule(name).modules()}
    homes: dict[int, set[int | None]] = {}
    found: dict[int, Any] = {}
    for module in model.modules():
        for value in own_attributes(module).values():
            if isinstance(value, list | dict | deque) or is_plain(value):
                homes.setdefault(id(value), set()).add(at.get(module))
                found[id(value)] = value
    return {identity: value for identity, value in found.items() if len(homes[identity]) > 1}


def _left_by(
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
        if _is_same(before.get((path, name)), leaves, spec) or not all(map(_can_be_told, leaves)):
            continue
        # In objects modules keep accounts of their own, too, for which ranks are not to wait.
        is_of_objects = any(isinstance(leaf, type) for leaf in leaves)
        if any(map(_is_tensor_to_tell if is_of_objects else _is_worth_telling, leaves)):
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


def _is_account(value: object) -> bool:
    """Whether it is an object in which there are no tensors, such as a configuration."""
    return is_plain(value) and not any(map(_may_have_tensors, state_of(value).values()))


def _may_have_tensors(value: object) -> bool:
    if isinstance(value, list | tuple | dict | deque):
        items = value.values() if isinstance(value, dict) else value
        return any(isinstance(one, Tensor | list | tuple | dict | deque) or is_plain(one) for one in items)
    return isinstance(value, Tensor) or is_plain(value)


def _is_tensor_to_tell(leaf: object) -> bool:
    return isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())


def _is_worth_telling(leaf: object) -> bool:
    return _is_tensor_to_tell(leaf) or (isinstance(leaf, int | float) and not isinstance(leaf, bool))


def _with_left(outcome: Outcome, left: Sequence[Left]) -> Outcome:
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
    leaves, spec = content_of(value)
    if spec is not left.spec:
        return [None] * len(left.leaves)
    described = describe(tuple(leaves), (), ())[0].results
    return [
        leaf if isinstance(one, Described) and isinstance(now, Described) and now.is_like(one) else None
        for leaf, now, one in zip(leaves, described, left.leaves, strict=True)
    ]
