"""The registry of tensor parallelism: which factory splits modules of which class.

A class is looked up as it is: a subclass may compute something else, so it is registered for itself. Classes of other
packages are known by name, so that nothing is imported for them. What a class of nobody's knowledge computes is known
where it says so itself: it has the forward of a layer of torch, or an interface that others compute it by (`Kind`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from tulle.errors import ModelError
from tulle.tensor_parallel.splitter import Splitter
from tulle.traits import makes_weights

M = TypeVar("M", bound=nn.Module)
Factory = Callable[[M, Splitter], None]
_factories: dict[str, Factory[Any]] = {}
_stacks: dict[str, Stack] = {}
_alone: set[str] = set()
_kinds: list[Kind] = []


@dataclass(frozen=True, slots=True)
class Kind:
    """Modules that are known by what they are, not by the names of their classes.

    Args:
        holds: Whether a module is one of them; asked of those whose class is not registered.
        factory: Splits one.
        is_alone: Whether they are single layers, which are split from some size on.
    """

    holds: Callable[[nn.Module], bool]
    factory: Factory[Any]
    is_alone: bool


@dataclass(frozen=True, slots=True)
class Stack:
    """Layers that follow one another, between which activations may be split along sequences.

    Args:
        layers: Name of the list of layers.
        final: Names of what comes after them and is done along sequences still, in order; those that are None, or
            absent, are left out.
        dim: Of the sequence in what goes into the first layer, given the stack.
        is_one: Whether all of the layers are split or none, because they share something that is split.
    """

    layers: str
    final: tuple[str, ...]
    dim: Callable[[nn.Module], int] = lambda _: 1
    is_one: bool = False


def register(module_class: type[M], factory: Factory[M]) -> None:
    """Say how modules of a class are split over an axis; what was registered for it before is replaced.

    Args:
        module_class: The class, exactly; subclasses are registered for themselves.
        factory: Called with a module and a `Splitter`, on every rank alike; changes the module in place. It answers
            for all the module's descendants: those that it leaves alone stay whole.

    Raises:
        ModelError: If `module_class` is not a class of modules, or `factory` cannot be called.

    Example:
        >>> from torch import nn
        >>> class Gate(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.up, self.gate, self.down = nn.Linear(4, 8), nn.Linear(4, 8), nn.Linear(8, 4)
        ...     def forward(self, x):
        ...         return self.down(self.up(x) * self.gate(x).sigmoid())
        >>> def split_gate(module: Gate, to: Splitter) -> None:
        ...     to.enter(module, "x")
        ...     to.column(module.up)
        ...     to.column(module.gate)
        ...     to.row(module.down)
        >>> register(Gate, split_gate)
    """
    if not (isinstance(module_class, type) and issubclass(module_class, nn.Module)):
        raise ModelError(f"tensor_parallel.register was given {module_class!r}, expected a subclass of nn.Module")
    if not callable(factory):
        raise ModelError(
            f"tensor_parallel.register was given {factory!r} as the factory of {module_class.__name__}, expected a "
            "function of a module and a Splitter"
        )
    _factories[path_of(module_class)] = factory


def register_names(
    factories: Mapping[str, Factory[Any]], stacks: Mapping[str, Stack], *, alone: Iterable[str] = ()
) -> None:
    """Register factories and stacks of classes that may not be imported, by `module.Class`.

    Args:
        factories: By class.
        stacks: By class.
        alone: Classes of single layers, which are split for the memory's sake only, and so only from some size on.
    """
    _factories.update(factories)
    _stacks.update(stacks)
    _alone.update(alone)


def register_kind(kind: Kind) -> None:
    """Register modules of classes that nobody knows by name, which are found by what they are."""
    _kinds.append(kind)


def factory_of(module: nn.Module) -> Factory[Any] | None:
    """The factory for a module, or None; none splits a weight that is made of other parameters."""
    factory = _factories.get(path_of(type(module)))
    if factory is None and (kind := _kind_of(module)):
        factory = kind.factory
    is_made = factory is not None and any(makes_weights(one) or is_parametrized(one) for one in module.modules())
    return None if is_made else factory


def is_alone(module: nn.Module) -> bool:
    """Whether a module is a single layer that is worth splitting from some size on."""
    path = path_of(type(module))
    if path in _factories:
        return path in _alone
    kind = _kind_of(module)
    return kind is not None and kind.is_alone


def _kind_of(module: nn.Module) -> Kind | None:
    return next((kind for kind in _kinds if kind.holds(module)), None)


def stack_of(module: nn.Module) -> Stack | None:
    """How a module's layers follow one another, or None if it is not a stack."""
    return _stacks.get(path_of(type(module)))


def path_of(module_class: type[nn.Module]) -> str:
    """A class by the name under which it can be imported, and its identity if it is local to a function."""
    path = f"{module_class.__module__}.{module_class.__qualname__}"
    return f"{path} {id(module_class)}" if "<" in path else path
