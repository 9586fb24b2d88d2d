"""What a forward of which ranks do parts is told by attributes: how much a rank has of it, and which way it goes."""

from __future__ import annotations

import copy
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from tulle.derived import put_before
from tulle.errors import ModelError

_TOLD = "_tulle_told_within"
"""The attribute by which a module holds what its forward is told."""
Told = tuple[nn.Module, str, Any]
"""A module, the name of an attribute, and its value."""
Decided = tuple[Any, str, Any]
"""The same, of a class or a module of Python too."""


class _Told(nn.Module):
    """What a module's class gains: within its forward some attributes say what a rank has, and the whole elsewhere."""

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        """As before."""
        told: tuple[Told, ...] = self.__dict__[_TOLD]
        before = [getattr(owner, name) for owner, name, _ in told]
        try:
            for owner, name, value in told:
                setattr(owner, name, value)
            return super().forward(*arguments, **keywords)
        finally:
            for (owner, name, _), value in zip(told, before, strict=True):
                setattr(owner, name, value)


def tell_within(module: nn.Module, told: tuple[Told, ...]) -> None:
    """Have attributes of modules, such as how many heads there are, be a rank's while another's forward runs."""
    module.__dict__[_TOLD] = told
    put_before(_Told, module)


class OfThree:
    """A hook after a layer: it gives three dimensions, as the code that comes after it was understood.

    Args:
        label: Which layer.
    """

    def __init__(self, label: str) -> None:
        self._label = label

    def __call__(self, _module: nn.Module, _inputs: object, output: Tensor) -> None:
        """Count them.

        Raises:
            ModelError: If there are others.
        """
        if output.dim() != 3:
            raise ModelError(
                f"{self._label} was given {output.dim()} dimensions, where what comes after it, split with it, takes "
                "samples, a sequence and features: leave it out with select"
            )


class Watch:
    """A hook before forward: attributes by which its code was understood are what they were.

    Args:
        label: Whose forward it is.
        decided: The attributes, and what they were.
    """

    def __init__(self, label: str, decided: tuple[Decided, ...]) -> None:
        self._label = label
        self._decided = decided

    def __deepcopy__(self, memo: Any) -> Watch:
        """The same of copies of modules, of what else is none of the model's."""
        decided = (
            (*(copy.deepcopy(one, memo) if isinstance(one, nn.Module) else one for one in (owner, value)), name)
            for owner, name, value in self._decided
        )
        return Watch(self._label, tuple((owner, name, value) for owner, value, name in decided))

    def __call__(self, *_: object) -> None:
        """Compare.

        Raises:
            ModelError: Naming the first that is another.
        """
        for owner, name, value in self._decided:
            found = getattr(owner, name, None)
            if found is not value and found != value:
                whose = owner.__name__ if isinstance(owner, type | ModuleType) else f"a {type(owner).__name__}"
                raise ModelError(
                    f"{name} of {whose} was {value!r} when layers of {self._label} were split "
                    f"together, and is {found!r} now, with which its forward may do something else: set it before "
                    f"tensor_parallel.apply, or leave {self._label} out with select"
                )
