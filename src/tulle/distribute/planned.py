"""`planned`: all that the planner can decide for a model, from a profile of its sample, kept for the next run."""

from __future__ import annotations

import logging
import math
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from tulle.allowance import cores
from tulle.comm import gather_values, probe
from tulle.deferred import is_deferred
from tulle.distribute.axes import DATA, MODEL, PIPE, Axes
from tulle.distribute.lateness import can_wait
from tulle.distribute.layers import whole_modules
from tulle.distribute.savings import check_savings
from tulle.distribute.stages import uncut
from tulle.environment import RUN_DIR
from tulle.errors import ModelError, PlanError, TulleError
from tulle.mesh import Axis, Mesh
from tulle.pipeline import pins_of
from tulle.pipeline.hooks import is_hooked
from tulle.placing import outputs_of, placements_of, shape_of, tables_of
from tulle.plan import AT_READ, AT_STEP, Memory, Plan, Shelf, Space, TablePlan, best_plan
from tulle.plan.shelf import digest
from tulle.profiling import profile, sparse_tables
from tulle.profiling.samples import samples_in, size_of
from tulle.sync import AUTO
from tulle.tensor_parallel import apply, known
from tulle.tensor_parallel.twin import without_memory
from tulle.workload import Profile

_LABEL = "the plan"
logger = logging.getLogger("tulle")


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is to be planned.

    Args:
        model: Not distributed yet.
        optimizers: Over its parameters.
        mesh: Where it will run, or, if the mesh is to be chosen too, all ranks along axis `data`.
        sample: This rank's.
        is_anew: Whether to make a plan whatever was kept of an earlier run.
        is_free: Whether the mesh is to be chosen.
    """

    model: nn.Module
    optimizers: Sequence[Optimizer]
    mesh: Mesh
    sample: object
    is_anew: bool = False
    is_free: bool = False


@dataclass(frozen=True, slots=True)
class Planned:
    """What came of it, the same on all ranks.

    Args:
        plan: None if the planner cannot plan for this model.
        key: Under which it is kept.
        reason: Why there is none.
    """

    plan: Plan | None
    key: str = ""
    reason: str = ""


def planned(wanted: Wanted) -> Planned:
    """The planner's choice for a model within a mesh: that of an earlier run, or one from a profile that is made now.

    Every rank must call it, each with its own sample. Rank 0 plans, and all hear of it.
    """
    axes = Axes.of(wanted.mesh)
    key = _key(wanted, axes)
    if not wanted.is_anew:
        kept = gather_values(_kept(key, wanted) if axes.whole.rank == 0 else None, axes.whole, label=_LABEL)[0]
        if kept is not None:
            return Planned(kept, key)
    logger.info(
        "profiling %s on %d ranks for a plan, which takes some seconds", type(wanted.model).__name__, axes.whole.size
    )
    try:
        found = profile(wanted.model, wanted.optimizers, wanted.sample, wanted.mesh)
    except ModelError as error:  # of one rank, and by then of all
        return Planned(None, key, str(error))
    made = _made(found, wanted, axes, key) if axes.whole.rank == 0 else Planned(None)
    return gather_values(made, axes.whole, label=_LABEL)[0]


def _key(wanted: Wanted, axes: Axes) -> str:
    """What a plan depends on, and can be told before anything is measured but the network. Every rank must call it."""
    model = wanted.model
    network = probe(axes.whole)
    parameters = dict(model.named_parameters())
    numbers = {id(parameter): number for number, parameter in enumerate(parameters.values())}
    told = {
        "model": f"{type(model).__module__}.{type(model).__qualname__}",
        "parameters": [(name, [*one.shape], str(one.dtype), one.requires_grad) for name, one in parameters.items()],
        "tables": [(name, [module.sparse for module in modules]) for name, modules in tables_of(model).items()],
        "placements": placements_of(model, wanted.optimizers, axes.data.size),
        "optimizers": [
            (type(one).__name__, [numbers.get(id(p)) for group in one.param_groups for p in group["params"]])
            for one in wanted.optimizers
        ],
        "pins": pins_of(model),
        # What is around these is not placed as one module.
        "hooked": [name for name, module in model.named_modules() if is_hooked(module)],
        "is_deferred": is_deferred(model),
        "batch": samples_in(wanted.sample),
        # In powers of two: samples of text are not of one length.
        "sample": round(math.log2(max(1, size_of(wanted.sample)))),
        # What forward refuses must not find the plan of what it took.
        "called": sorted(map(str, wanted.sample)) if isinstance(wanted.sample, Mapping) else _arguments(wanted.sample),
        "mesh": None if wanted.is_free else [*wanted.mesh.shape.items()],
        "hosts": [*axes.whole.hosts],
        "device": [str(wanted.mesh.device.type), platform.machine(), platform.processor(), cores()],
        # In powers of four: the same network is not measured alike twice.
        "network": round(math.log(network.bandwidth_bytes_per_s, 4)) if axes.whole.size > 1 else None,
    }
    return digest(told)


def _arguments(sample: object) -> int:
    """With how many arguments a model is called on what is no mapping."""
    return len(sample) if isinstance(sample, tuple) else 1


def _kept(key: str, wanted: Wanted) -> Plan | None:
    """What an earlier run has kept, if it still fits."""
    shelf = Shelf.of()
    found = shelf.find(key)
    if found is None:
        return None
    tables = {name: shape_of(wanted.model, name) for name in tables_of(wanted.model)}
    modules = dict(wanted.model.named_modules())
    try:
        found.check(found.mesh if wanted.is_free else wanted.mesh.shape, tables, modules)
        check_savings(found, wanted.model, wanted.optimizers, Axes.of(wanted.mesh))
    except PlanError as error:
        logger.info("the plan that was kept is of no use, and another is made: %s", error)
        return None
    logger.info('the plan of an earlier run is taken again; plan="anew" makes another')
    if (words := shelf.noted(key)) is not None:
        logger.warning('the plan that was kept is off: %s; plan="anew", or tulle run --anew, makes another', words)
    return found


def _made(found: Profile, wanted: Wanted, axes: Axes, key: str) -> Planned:
    """Plan, and keep the plan. On rank 0."""
    try:
        plan = _best(found, wanted, axes)
    except Exception as error:  # the others wait, whatever it is
        return Planned(None, key, f"no plan was found ({type(error).__name__}: {error})")
    try:
        Shelf.of().put(key, plan)
        if run := os.environ.get(RUN_DIR):  # where the report finds what stages take
            found.save(Path(run, "profile.json"))
    except OSError as error:
        logger.info("the plan is not kept for the next run: %s", error)
    return Planned(plan, key)


def _best(found: Profile, wanted: Wanted, axes: Axes) -> Plan:
    space = _space(wanted, axes)
    tables = {table.name for table in found.tables}  # one that is frozen is none of them
    space = replace(space, schemes={name: scheme for name, scheme in space.schemes.items() if name in tables})
    batch = found.batch * (axes.whole.size if wanted.is_free else axes.data.size)
    plan = best_plan(found, found.cluster, batch=batch, space=space)
    if wanted.is_free and not any(_can_split(wanted.model, plan, names) for names in (plan.tensor_parallel, ())):
        plan = best_plan(found, found.cluster, batch=batch, space=replace(space, mesh={MODEL: 1}))
    return _fitted(plan, wanted, found)


def _space(wanted: Wanted, axes: Axes) -> Space:
    """What can be put on this model, with these optimizers, on this mesh."""
    sizes = {name: wanted.mesh.shape.get(name, 1) for name in (DATA, PIPE, MODEL)}
    optimizers, tables = wanted.optimizers, [*tables_of(wanted.model)]
    split = split_anyway(wanted.model, optimizers, axes)
    apart = [*{**sparse_tables(wanted.model), **split}]
    whole = Plan(wanted.mesh.shape)
    return Space(
        mesh={} if wanted.is_free else sizes,
        schemes=dict.fromkeys(split, "rows"),
        memories=tuple(one for one in Space().memories if _can_save(one, wanted, apart, axes)),
        schedules=(AT_STEP, AT_READ) if can_wait(whole, wanted.model, optimizers, axes) else (AT_STEP,),
        # Some may be split and others not: an optimizer that steps tables alone may have to step both.
        shares_with_tables=all(_can_save(Memory(shard_optimizer=True), wanted, [name], axes) for name in tables),
    )


def split_anyway(model: nn.Module, optimizers: Sequence[Optimizer], axes: Axes) -> dict[str, str]:
    """The tables that are split by rows whatever it costs, each with the reason."""
    split = {name: "a softmax is computed where its rows lie" for name in outputs_of(model)}
    if is_deferred(model) and axes.pipe is None:  # stages need not be built whole either
        placements = placements_of(model, optimizers, axes.data.size, is_asked=True)
        splittable = [name for name, ways in placements.items() if "rows" in ways]
        split = dict.fromkeys(splittable, "the model was built without memory") | split
    return split


def _can_save(memory: Memory, wanted: Wanted, names: Sequence[str], axes: Axes) -> bool:
    """Whether memory can be saved so, if these tables are kept in step in a way of their own."""
    tables = tuple(TablePlan(name, *shape_of(wanted.model, name), AUTO) for name in names)
    try:
        check_savings(Plan(wanted.mesh.shape, tables, memory=memory), wanted.model, wanted.optimizers, axes)
    except TulleError:
        return False
    return True


def _fitted(plan: Plan, wanted: Wanted, found: Profile) -> Plan:
    """The planner's plan in the words of `distribute`: what goes by other rules than costs is left to those."""
    mesh = plan.mesh if wanted.is_free else wanted.mesh.shape
    stages = {} if pins_of(wanted.model) else dict(plan.stages)
    stages = uncut(stages, known(wanted.model)) if plan.mesh.get(MODEL, 1) > 1 else stages
    layers = _layers(plan, wanted.model, [piece.name for piece in found.modules if piece.split])
    split = layers if _can_split(wanted.model, plan, layers) else ()
    return replace(plan, mesh=dict(mesh), stages=stages, tensor_parallel=split)


def _layers(plan: Plan, model: nn.Module, splittable: Sequence[str]) -> tuple[str, ...]:
    """The modules that axis `model` splits, each as one as it is registered; none if they are all there are."""
    chosen = plan.tensor_parallel
    if set(splittable) <= set(chosen):
        return ()
    registered = known(model, ranks=plan.mesh.get(MODEL, 1))
    layers: dict[str, bool] = {}
    for name in splittable:
        layer = next((one for one in registered if name.startswith(f"{one}.")), name)
        layers[layer] = layers.get(layer, True) and name in chosen
    return tuple(name for name, is_chosen in layers.items() if is_chosen)


def _can_split(model: nn.Module, plan: Plan, names: Sequence[str]) -> bool:
    """Whether axis `model` can split these modules, or all that is registered if there are none: tried on a copy."""
    ranks = plan.mesh.get(MODEL, 1)
    nobody = cast("dist.ProcessGroup", None)  # cutting sends nothing
    axis = Axis(MODEL, 0, ranks, tuple(range(ranks)), nobody, torch.device("meta"), 0.0)
    try:
        apply(without_memory(model), axis, select=list(names) or None, leave=whole_modules(model, plan))
    except ModelError:
        return False
    return True
