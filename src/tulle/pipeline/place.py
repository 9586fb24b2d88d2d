"""`place`: puts the modules of a model on the ranks of an axis, and lets go of what belongs to others."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from tulle.comm import gather_values, raise_together
from tulle.deferred import give, is_deferred, materialize, swappable, values_of
from tulle.errors import ModelError, PlanError, TulleError
from tulle.mesh import Axis
from tulle.pipeline.automatic import deal
from tulle.pipeline.carried import Carried
from tulle.pipeline.holdings import Unit
from tulle.pipeline.lent import is_lacking
from tulle.pipeline.partition import Partition
from tulle.pipeline.run import Resident, Runtime, runtime_of
from tulle.pipeline.tied import Tied
from tulle.pipeline.weights import pass_over_others, read_weights

M = TypeVar("M", bound=nn.Module)
Assignment = Mapping[str, int]
"""The stage of each placed module by its name."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a model's modules live.

    Args:
        runtime: What runs it.
        stages: Of each placed module, by name.
        owners: Ranks that hold each parameter, by name, ascending; a tied one by its first name.
        partition: What led to that, if it was not given.
    """

    runtime: Runtime
    stages: Assignment
    owners: Mapping[str, Sequence[int]]
    partition: Partition | None = None
    resident: Resident | None = None

    def is_held(self, name: str) -> bool:
        """Whether this rank has the values of a parameter or buffer."""
        return self.runtime.axis.rank in self.owners[name]


class PlacedCall:
    """How a placed model is called; its placement lies here, which a copy of the model does not take along.

    Args:
        placement: Of the model.
        root: The model's own call.
    """

    def __init__(self, placement: Placement, root: Callable[..., Any]) -> None:
        self.placement = placement
        self._root = root

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model on all ranks."""
        return self.placement.runtime.call_model(self._root, args, kwargs)


def place(
    model: M,
    axis: Axis,
    assignment: Assignment | None = None,
    *,
    sample: object = None,
    stages: int | None = None,
    memory_bytes: int | None = None,
    weights: str | Path | None = None,
) -> M:
    """Put modules on the ranks of an axis: stage *s* on rank *s* modulo the axis' size. Every rank must call it, alike.

    Afterwards every rank calls the same model with the same batch: a placed module runs on its owner, and all other
    ranks go on with placeholders. Parameters of other ranks turn into `meta` tensors, the same objects still, so that
    an optimizer made before has state for those of this rank only.

    Args:
        model: Built alike on all ranks.
        axis: Such as `mesh["pipe"]`.
        assignment: Stage of modules by name. What is within a placed module goes with it; a parameter of none goes with
            the first placed module beside it. None for a partition by profile: see `deal`.
        sample: One micro-batch, for the profile.
        stages: How many, for the profile; default one a rank.
        memory_bytes: What a stage may take, for the profile.
        weights: A checkpoint of the whole model, of which each rank reads its part: see `read_weights`. Without one,
            each rank makes its part of a model that was built in `tulle.deferred_init`, with the random numbers of one
            process, and draws those of the others in vain, so that all go on alike.

    Returns:
        The model that was given.

    Raises:
        PlanError: If ranks were given different assignments, a name is not a module, or neither assignment nor sample
            was given; and what `deal` raises.
        ModelError: If the model was placed before, or the ranks' models differ in parameters.

    Example:
        >>> import torch, tulle
        >>> from tulle import pipeline
        >>> mesh = tulle.init(pipe=1)
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
        >>> model = pipeline.place(model, mesh["pipe"], {"0": 0, "1": 0})
        >>> model(torch.ones(1, 2)).sum().backward()
        >>> model[0].weight.grad.shape
        torch.Size([2, 2])
    """
    found: Partition | None = None
    if assignment is None:
        if sample is None:
            raise PlanError("place was given neither an assignment of modules to stages nor a sample: give one of them")
        dealt = deal(model, sample, axis, stages=stages, memory_bytes=memory_bytes)
        assignment, found = dealt.assignment, dealt.partition
    error: TulleError | None = None
    placed: dict[str, int] = {}
    try:
        placed = outermost(model, assignment)
    except TulleError as wrong:
        error = wrong
    raise_together(error, axis, label="the assignment of modules to stages")
    _check_alike(model, placed, axis)
    runtime = runtime_of(axis, gather_values(torch.initial_seed(), axis, label="the seed")[0])
    runtime.placed += 1
    units = [Unit(name, model.get_submodule(name), stage, runtime.placed) for name, stage in placed.items()]
    homes = _homes(model, units)
    owners = {name: _ranks(stages, axis) for name, stages in homes.items()}
    was_deferred = is_deferred(model)
    with swappable(model):
        raise_together(_let_go_of_others(model, owners, axis), axis, label="what lives at other stages")
        held = {name: tensor for name, tensor in _tensors(model) if axis.rank in owners[name]}
        if weights is not None:
            raise_together(_read(model, held, axis, weights), axis, label="what lives at this stage")
        elif was_deferred:
            materialize(model, device=axis.device, only=held, axis=axis)
    pass_over_others(model)
    tied = _made_equal(model, owners, runtime)
    gc.collect()  # the order of micro-batches goes by the models there are: one that was dropped is gone on all ranks
    stages, carried = 1 + max(placed.values(), default=0), Carried(model, placed)
    resident = Resident(list(model.parameters()), tied, stages, carried)
    for name, tensor in _tensors(model):
        runtime.holdings.note(tensor, min(homes[name], default=None), runtime.placed, name)
    runtime.models[runtime.placed] = resident
    for unit in units:
        if unit.name:
            unit.module._compiled_call_impl = _as_unit(runtime, unit)
    root = next((_as_unit(runtime, unit) for unit in units if not unit.name), model._call_impl)
    model._compiled_call_impl = PlacedCall(Placement(runtime, placed, owners, found, resident), root)
    return model


def placement_of(model: nn.Module) -> Placement | None:
    """Where a model's modules live, or None if it was not placed."""
    called = model._compiled_call_impl
    return called.placement if isinstance(called, PlacedCall) else None


def pipeline_of(models: Sequence[nn.Module]) -> Runtime | None:
    """What runs the placed ones among some models, or None."""
    return next((placement.runtime for model in models if (placement := placement_of(model))), None)


def outermost(model: nn.Module, assignment: Assignment) -> dict[str, int]:
    """The assignment without modules that go with one around them.

    Raises:
        PlanError: If a name is not a module's, a stage is no number from 0, or modules within one another are dealt to
            different stages.
    """
    modules = dict(model.named_modules())
    kept: dict[str, int] = {}
    for name in sorted(assignment, key=lambda name: name.count(".") if name else -1):
        stage = assignment[name]
        if name not in modules:
            near = ", ".join(list(modules)[1:6])
            raise PlanError(f"the assignment names {name!r}, which is not a module of the model: it has {near}, ...")
        if not isinstance(stage, int) or stage < 0:
            raise PlanError(f"the assignment deals {name!r} to stage {stage!r}, expected a number from 0")
        around = next((other for other in kept if _is_within(name, other)), None)
        if around is None:
            kept[name] = stage
        elif kept[around] != stage:
            raise PlanError(
                f"the assignment deals {name!r} to stage {stage} and {around!r}, which is around it, to "
                f"{kept[around]}: deal the modules within {around!r} one by one"
            )
    if len({id(modules[name]) for name in kept}) < len(kept):
        raise PlanError("the assignment names one module twice, by two of its names: leave one out")
    return {name: kept[name] for name in assignment if name in kept}


def homes_of(model: nn.Module, assignment: Assignment) -> dict[str, list[int]]:
    """The stages that would hold each parameter and buffer by name; none for a buffer that all ranks hold.

    Raises:
        PlanError: If the assignment does not fit the model.
    """
    units = [Unit(name, model.get_submodule(name), stage) for name, stage in outermost(model, assignment).items()]
    return _homes(model, units)


def _is_within(name: str, other: str) -> bool:
    return not other or name.startswith(f"{other}.")


def _check_alike(model: nn.Module, stages: Assignment, axis: Axis) -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in model.named_parameters()}
    heard = gather_values(
        (dict(stages), shapes, placement_of(model) is not None), axis, label="the assignment of modules to stages"
    )
    for rank, (theirs, other_shapes, is_placed) in enumerate(heard):
        if is_placed:
            raise ModelError("the model was placed before: place a model once, or a copy of it (copy.deepcopy)")
        if theirs != heard[0][0]:
            raise PlanError(f"rank {rank} was given the assignment {theirs}, rank 0 {heard[0][0]}: give all the same")
        if other_shapes != heard[0][1]:
            name = next(n for n in {**other_shapes, **heard[0][1]} if other_shapes.get(n) != heard[0][1].get(n))
            raise ModelError(
                f"the parameter {name!r} has the shape {other_shapes.get(name)} on rank {rank} and "
                f"{heard[0][1].get(name)} on rank 0: build the same model on all ranks"
            )


def _homes(model: nn.Module, units: Sequence[Unit]) -> dict[str, list[int]]:
    """The stages that hold each parameter and buffer; none for a buffer of no unit, which all ranks hold."""
    held: dict[int, list[int]] = {}
    for unit in units:
        for _, tensor in _tensors(unit.module):
            held.setdefault(id(tensor), []).append(unit.stage)
    return {
        name: held.get(id(tensor)) or ([_beside(name, units)] if isinstance(tensor, nn.Parameter) else [])
        for name, tensor in _tensors(model)
    }


def _ranks(stages: Sequence[int], axis: Axis) -> tuple[int, ...]:
    return tuple(sorted({stage % axis.size for stage in stages})) or tuple(range(axis.size))


def _read(model: nn.Module, held: Mapping[str, Tensor], axis: Axis, weights: str | Path) -> TulleError | None:
    """Give what this rank holds the checkpoint's values; what is not saved, such as masks, those of the constructor."""
    saved = set(model.state_dict())
    try:
        read_weights(weights, {name: tensor for name, tensor in held.items() if name in saved}, axis.device)
        left = [name for name, tensor in held.items() if name not in saved and is_lacking(tensor, axis.device)]
        for name, values in values_of(model, left).items():
            give(held[name], values.to(axis.device))
    except TulleError as error:
        return error
    return None


def _made_equal(model: nn.Module, owners: Mapping[str, Sequence[int]], runtime: Runtime) -> list[Tied]:
    """Start what several ranks hold from the first one's; give the parameters among it."""
    tied: list[Tied] = []
    for number, (name, tensor) in enumerate(_tensors(model)):
        if len(owners[name]) > 1:
            runtime.copy_from_first(tensor, owners[name], (runtime.placed, number), name)
            if isinstance(tensor, nn.Parameter):
                tied.append(Tied(name, tensor, owners[name]))
    return tied


def _let_go_of_others(model: nn.Module, owners: Mapping[str, Sequence[int]], axis: Axis) -> ModelError | None:
    """Free the memory of what this rank does not hold."""
    try:
        for name, tensor in _tensors(model):
            if axis.rank not in owners[name]:
                let_go(tensor, name)
    except ModelError as error:
        return error
    return None


def _beside(name: str, units: Sequence[Unit]) -> int:
    """Where a parameter of no unit goes: to the first unit within the module that has it, or around that."""
    parent = name.rpartition(".")[0]
    while True:
        beside = [unit.stage for unit in units if _is_within(unit.name, parent)]
        if beside or not parent:
            return min(beside, default=0)
        parent = parent.rpartition(".")[0]


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def let_go(tensor: Tensor, name: str) -> None:
    """Free a parameter's memory; the object stays, as a `meta` tensor."""
    if tensor.is_meta:
        return
    empty = torch.empty_like(tensor, device="meta", requires_grad=tensor.requires_grad)
    try:
        torch.utils.swap_tensors(
            tensor, nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
        )
    except RuntimeError as error:
        raise ModelError(
            f"the memory of {name!r}, which lives at another stage, cannot be given back, because something refers to "
            "it: place the model before its first forward, and before hooks are put on its parameters"
        ) from error


def _as_unit(runtime: Runtime, unit: Unit) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return runtime.call_unit(unit, args, kwargs)

    return call
