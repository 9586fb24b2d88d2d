"""Where each parameter and buffer of a model lives, if its modules are dealt to stages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor, nn

from tulle.errors import PlanError
from tulle.mesh import Axis
from tulle.pipeline.holdings import Unit
from tulle.traits import has_forward

Assignment = Mapping[str, int]
"""The stage of each placed module by its name."""


def by_first_names(model: nn.Module, assignment: Assignment) -> dict[str, int]:
    """The assignment with each module by the first of its names; a name that is no module's stays.

    Raises:
        PlanError: If it is no mapping, or a module is dealt to two stages, by two of its names.
    """
    if not isinstance(assignment, Mapping):
        raise PlanError(
            f"the assignment is {assignment!r}, expected the stages of modules by name: {{'decoder': 1}}, say"
        )
    first = {module: name for name, module in model.named_modules()}
    modules = dict(model.named_modules(remove_duplicate=False))
    found: dict[str, int] = {}
    for name, stage in assignment.items():
        own = first[modules[name]] if name in modules else name
        if found.setdefault(own, stage) != stage:
            other = next(one for one in assignment if modules.get(one) is modules[name])
            raise PlanError(
                f"the assignment deals {other!r} to stage {assignment[other]} and {name!r} to stage {stage}, and both "
                "are names of one module: name it once"
            )
    return found


def outermost(model: nn.Module, assignment: Assignment) -> dict[str, int]:
    """The assignment without modules that go with one around them, each by the first of its names.

    Of what is never called (`nn.ModuleList`, `nn.ModuleDict`) the modules in it are dealt: what they compute would run
    between modules, operation by operation.

    Raises:
        PlanError: If a name is not a module's, a stage is no number from 0, or modules within one another are dealt to
            different stages.
    """
    assignment = by_first_names(model, assignment)
    modules = dict(model.named_modules())
    kept: dict[str, int] = {}
    for name in sorted(assignment, key=lambda name: name.count(".") if name else -1):
        stage = assignment[name]
        if name not in modules:
            near = ", ".join(list(modules)[1:6])
            raise PlanError(f"the assignment names {name!r}, which is not a module of the model: it has {near}, ...")
        if not isinstance(stage, int) or stage < 0:
            raise PlanError(f"the assignment deals {name!r} to stage {stage!r}, expected a number from 0")
        around = next((other for other in outward(name) if other in kept), None)
        if around is None:
            kept[name] = stage
        elif kept[around] != stage:
            raise PlanError(
                f"the assignment deals {name!r} to stage {stage} and {around!r}, which is around it, to "
                f"{kept[around]}: deal the modules within {around!r} one by one"
            )
    first = {module: name for name, module in modules.items()}
    dealt: dict[str, int] = {}
    for name in (name for name in assignment if name in kept):
        for own in (first[called] for called in _called_within(modules[name])):
            dealt[own] = kept.get(own, kept[name])  # a module of a list may be dealt by a name of its own, too
    return dealt


def _called_within(module: nn.Module) -> Iterator[nn.Module]:
    """The module, or those in it if it only holds them."""
    has_own = any(one is not None for one in (*module._parameters.values(), *module._buffers.values()))
    children = list(module.children())
    if has_forward(module) or has_own or not children:
        yield module
        return
    for child in children:
        yield from _called_within(child)


def homes_of(model: nn.Module, assignment: Assignment) -> dict[str, list[int]]:
    """The stages that would hold each parameter and buffer by name; none for a buffer that all ranks hold.

    Raises:
        PlanError: If the assignment does not fit the model.
    """
    units = [Unit(name, model.get_submodule(name), stage) for name, stage in outermost(model, assignment).items()]
    return homes(model, units)


def outward(name: str) -> list[str]:
    """A module's name, and those of all that it is within, the innermost first.

    Example:
        >>> outward("layers.0.norm")
        ['layers.0.norm', 'layers.0', 'layers', '']
    """
    ends = [place for place, letter in enumerate(name) if letter == "."]
    return [name, *(name[:end] for end in reversed(ends)), *([""] if name else [])]


def homes(model: nn.Module, units: Sequence[Unit]) -> dict[str, list[int]]:
    """The stages that hold each parameter and buffer; none for a buffer of no unit, which all ranks hold."""
    held: dict[int, list[int]] = {}
    first: dict[str, int] = {}  # by module the first stage of what is within it
    for unit in units:
        for outer in outward(unit.name):
            first[outer] = min(unit.stage, first.get(outer, unit.stage))
        for _, tensor in tensors_of(unit.module):
            held.setdefault(id(tensor), []).append(unit.stage)
    return {
        name: held.get(id(tensor)) or ([_beside(name, first)] if isinstance(tensor, nn.Parameter) else [])
        for name, tensor in tensors_of(model)
    }


def ranks_of(stages: Sequence[int], axis: Axis) -> tuple[int, ...]:
    """The ranks of some stages, ascending; all ranks of the axis for none."""
    return tuple(sorted({stage % axis.size for stage in stages})) or tuple(range(axis.size))


def _beside(name: str, first: Mapping[str, int]) -> int:
    """Where a parameter of no unit goes: to the first unit within the module that has it, or around that."""
    return next((first[outer] for outer in outward(name)[1:] if outer in first), 0)


def tensors_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers by their names."""
    yield from model.named_parameters()
    yield from model.named_buffers()
