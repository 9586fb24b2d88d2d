"""`place`: puts the modules of a model on the ranks of an axis, and lets go of what belongs to others."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tulle.comm import eager, gather_values, raise_together
from tulle.deferred import give, is_deferred, materialize, swappable, values_of
from tulle.errors import ModelError, PlanError, TulleError
from tulle.mesh import Axis
from tulle.pipeline.automatic import deal
from tulle.pipeline.carried import Carried
from tulle.pipeline.elsewhere import elsewhere, note_alone, refuse_in_place_of_own
from tulle.pipeline.holdings import Unit
from tulle.pipeline.homes import Assignment, homes, outermost, ranks_of, tensors_of
from tulle.pipeline.kept import shared_in
from tulle.pipeline.leaves import attributes_that_are_leaves
from tulle.pipeline.lent import is_lacking
from tulle.pipeline.partition import Partition
from tulle.pipeline.resident import Resident
from tulle.pipeline.run import Runtime, runtime_of
from tulle.pipeline.tied import Tied
from tulle.pipeline.unfit import refuse_lazy, refuse_scripted
from tulle.pipeline.weights import pass_over_others, read_weights
from tulle.spread import Spread, spread_over

M = TypeVar("M", bound=nn.Module)
_placed: WeakSet[nn.Module] = WeakSet()


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a model's modules live.

    Args:
        runtime: What runs it.
        stages: Of each placed module, by name.
        owners: Ranks that hold each parameter, by name, ascending; a tied one by its first name.
        resident: What the run-time wants of it.
        partition: What led to that, if it was not given.
    """

    runtime: Runtime
    stages: Assignment
    owners: Mapping[str, Sequence[int]]
    resident: Resident
    partition: Partition | None = None

    def is_held(self, name: str) -> bool:
        """Whether this rank has the values of a parameter or buffer."""
        return self.runtime.axis.rank in self.owners[name]


class PlacedCall:
    """How a placed model is called; its placement lies here, which a copy of the model does not take along.

    Args:
        placement: Of the model.
        root: The model's own call.
        calls: How each module that is placed is called.
    """

    def __init__(
        self, placement: Placement, root: Callable[..., Any], calls: Sequence[tuple[Unit, Callable[..., Any]]]
    ) -> None:
        self.placement = placement
        self._root, self._calls = root, calls

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model on all ranks."""
        for unit, call in self._calls:
            if unit.module._compiled_call_impl is not call:  # module.compile() put its own there
                unit.compiled, unit.module._compiled_call_impl = unit.module._compiled_call_impl, call
        self.placement.runtime.holdings.modes.look(self.placement.resident.modules[0])
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
    an optimizer made before has state for those of this rank only. Their `device` is the axis' one, where their
    `new_zeros` and the like make tensors; `is_meta` tells.

    Args:
        model: Built alike on all ranks.
        axis: Such as `mesh["pipe"]`.
        assignment: Stage of modules by name. What is within a placed module goes with it, and the modules of an
            `nn.ModuleList` are placed one by one; a parameter of none goes with the first placed module beside it. None
            for a partition by profile: see `deal`.
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
        ModelError: If the model was placed before, has lazy modules, or the ranks' models differ in parameters.

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
    placed = _agreed(model, assignment, axis)
    runtime = runtime_of(axis, gather_values(torch.initial_seed(), axis, label="the seed")[0])
    number = runtime.next_model()
    modules = {name: model.get_submodule(name) for name in placed}
    units = [Unit(name, modules[name], at, number, modules[name]._compiled_call_impl) for name, at in placed.items()]
    stages_of = homes(model, units)
    owners = {name: ranks_of(at, axis) for name, at in stages_of.items()}
    _give_values(model, owners, axis, weights)
    pass_over_others(model)
    tied = _made_equal(model, owners, runtime)
    gc.collect()  # the order of micro-batches goes by the models there are: one that was dropped is gone on all ranks
    count, carried = 1 + max(placed.values(), default=0), Carried(model, placed)
    resident = runtime.models[number] = Resident(list(model.parameters()), tied, count, carried, list(model.modules()))
    for name, tensor in tensors_of(model):
        runtime.holdings.note(tensor, min(stages_of[name], default=None), number, name)
        if len({at % axis.size for at in stages_of[name]}) > 1:
            runtime.holdings.note_copied(tensor, name)
    for name, parameter in model.named_parameters() if axis.size > 1 else ():
        spread_over(parameter, Spread((axis,), counts=axis.rank == min(owners[name])))
    _watch_optimizers()
    shared = shared_in(model, {name: at % axis.size for name, at in placed.items()})
    for unit in units:
        unit.attributes.shared = shared
        carried.left.follow(unit.name, unit.attributes)
    _follow_calls(model, units, Placement(runtime, placed, owners, resident, found))
    return model


@cache
def _watch_optimizers() -> None:
    """Look at the steps of all optimizers of this process from now on."""
    register_optimizer_step_pre_hook(_check_sees_enough)


def _check_sees_enough(optimizer: Optimizer, *_: object) -> None:
    """Raise before a step that would look at parameters of other stages."""
    if isinstance(optimizer, LBFGS) and any(p.is_meta for group in optimizer.param_groups for p in group["params"]):
        raise ModelError(
            "LBFGS looks at all parameters at once, of which a rank of axis 'pipe' has those of its own stages: use an "
            "optimizer that steps each by itself, or axis 'data' alone"
        )


def _agreed(model: nn.Module, assignment: Assignment, axis: Axis) -> dict[str, int]:
    """The assignment without what goes with a module around it, if all ranks have the same, and the same model."""
    error: TulleError | None = None
    placed: dict[str, int] = {}
    try:
        refuse_scripted(model)
        refuse_lazy(model)
        placed = outermost(model, assignment)
    except TulleError as wrong:
        error = wrong
    raise_together(error, axis, label="the assignment of modules to stages")
    _check_alike(model, placed, axis)
    return placed


def _give_values(model: nn.Module, owners: Mapping[str, Sequence[int]], axis: Axis, weights: str | Path | None) -> None:
    """Have each rank hold the values of what lives there, and of nothing else."""
    was_deferred = is_deferred(model)
    if weights is None:
        _check_there(model, owners, axis)
    with swappable(model):
        raise_together(_let_go_of_others(model, owners, axis), axis, label="what lives at other stages")
        held = {name: tensor for name, tensor in tensors_of(model) if axis.rank in owners[name]}
        if weights is not None:
            raise_together(_read(model, held, axis, weights), axis, label="what lives at this stage")
        elif was_deferred:
            materialize(model, device=axis.device, only=held, axis=axis)
    for name, tensor in held.items():
        if len(owners[name]) == 1 and tensor.layout == torch.strided:
            note_alone(tensor)


def _follow_calls(model: nn.Module, units: Sequence[Unit], placement: Placement) -> None:
    """Have calls of placed modules, and of the model, come to the run-time."""
    runtime = placement.runtime
    calls = [(unit, _as_unit(runtime, unit)) for unit in units]
    within = [(unit, call) for unit, call in calls if unit.name]
    for unit, call in within:
        unit.module._compiled_call_impl = call
    root = next((call for unit, call in calls if not unit.name), model._call_impl)
    model._compiled_call_impl = PlacedCall(placement, root, within)
    if _check_called not in model._forward_pre_hooks.values():  # a copy of a placed model has it already
        model.register_forward_pre_hook(_check_called)
    _placed.add(model)


@eager
def _check_called(model: nn.Module, _: object) -> None:
    """Raise before a model runs whose call is not the placed one's, though values of it are on other ranks."""
    if placement_of(model) is None and any(tensor.is_meta for _, tensor in tensors_of(model)):
        raise ModelError(
            f"a {type(model).__name__} was called of which other ranks have parameters, and nothing places the call: "
            "model.compile() of the whole model undoes that (compile modules within it, or take torch.compile(model)), "
            "and a copy, as copy.deepcopy and AveragedModel make it, is not placed (load its parameters into a model "
            'that is, or pipeline.place(copy, mesh["pipe"], stages) with the stages of the original)'
        )


def placement_of(model: nn.Module) -> Placement | None:
    """Where a model's modules live, or None if it was not placed."""
    called = model._compiled_call_impl
    return called.placement if isinstance(called, PlacedCall) else None


def is_any_placed() -> bool:
    """Whether any model of this process was."""
    return bool(_placed)


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


def _check_there(model: nn.Module, owners: Mapping[str, Sequence[int]], axis: Axis) -> None:
    """Refuse to draw anew what another rank has the values of, as of a copy of a model that was placed otherwise."""
    lacking = {name for name, tensor in tensors_of(model) if tensor.is_meta}
    everywhere = gather_values(lacking, axis, label="what has no values")
    for name, ranks in owners.items():
        wanting = [rank for rank in ranks if name in everywhere[rank]]
        if wanting and any(name not in of_rank for of_rank in everywhere):
            raise ModelError(
                f"{name!r} is to live on rank {wanting[0]}, where it has no values, while another rank has them: "
                "place a copy of a placed model with the assignment of the original, or give weights"
            )


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
    """Start what several ranks hold from the first one's; give what is trained of it, and of modules' attributes."""
    tied = [Tied(name, leaf, range(runtime.axis.size)) for name, leaf in attributes_that_are_leaves(model)]
    for number, (name, tensor) in enumerate(tensors_of(model)):
        if len(owners[name]) > 1:
            if tensor.layout not in (torch.strided, torch.sparse_coo):
                raise ModelError(
                    f"{name!r} is {tensor.layout} and is held by the ranks {list(owners[name])}, but such values do "
                    "not travel between stages: register it in the placed module that reads it"
                )
            runtime.copy_from_first(tensor, owners[name], (-runtime.placed, number), name)
            if isinstance(tensor, nn.Parameter):
                tied.append(Tied(name, tensor, owners[name]))
    return tied


def _let_go_of_others(model: nn.Module, owners: Mapping[str, Sequence[int]], axis: Axis) -> ModelError | None:
    """Free the memory of what this rank does not hold."""
    refuse_in_place_of_own()
    try:
        for name, tensor in tensors_of(model):
            if axis.rank not in owners[name]:
                _let_go(tensor, name)
                if type(tensor) in (nn.Parameter, Tensor) and tensor.layout == torch.strided:
                    elsewhere(tensor, axis.device)
    except ModelError as error:
        return error
    return None


def _let_go(tensor: Tensor, name: str) -> None:
    """Free the memory of a parameter or buffer; the object stays, as a `meta` tensor.

    Raises:
        ModelError: If something refers to that memory, as a graph does.
    """
    if tensor.is_meta:
        return
    empty = torch.empty_like(tensor, device="meta", requires_grad=tensor.requires_grad)
    if isinstance(tensor, nn.Parameter):
        empty = nn.Parameter(empty, tensor.requires_grad)
    vars(empty).update(vars(tensor))  # what was set on it
    try:
        torch.utils.swap_tensors(tensor, empty)
    except RuntimeError as error:
        raise ModelError(
            f"the memory of {name!r}, which lives at another stage, cannot be given back, because something refers to "
            "it: place the model before its first forward, and before hooks are put on its parameters"
        ) from error


def _as_unit(runtime: Runtime, unit: Unit) -> Callable[..., Any]:
    untraced = eager(runtime.call_unit)

    def call(*args: Any, **kwargs: Any) -> Any:
        # `eager` alone would do, but costs each call what the compiler wants to know first.
        run = untraced if torch.compiler.is_dynamo_compiling() else runtime.call_unit
        return run(unit, args, kwargs)

    return call
