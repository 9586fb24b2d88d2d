"""Puts on what a plan does to save memory."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence

from torch import nn
from torch.optim import Optimizer, SparseAdam

from tulle.comm import ranks_by_host
from tulle.distribute.axes import Axes
from tulle.errors import PlanError
from tulle.memory import compute_in, offload, recompute, repeated, shard_optimizer, share_out
from tulle.memory.options import HOST
from tulle.mesh import Axis
from tulle.pipeline import placement_of
from tulle.plan import Plan
from tulle.profiling import sparse_tables
from tulle.traits import SHARDABLE, doubt, is_of_wholes, is_shardable

logger = logging.getLogger("tulle")


def check_savings(plan: Plan, model: nn.Module, optimizers: Sequence[Optimizer], axes: Axes) -> None:
    """Refuse what cannot be done to this model with these optimizers.

    Args:
        plan: What is asked for.
        model: Not put on ranks yet.
        optimizers: Over its parameters.
        axes: Of the mesh.

    Raises:
        PlanError: Naming the option and the mend.
    """
    memory = plan.memory
    what = next((option for option in ("full_shard", "shard_optimizer") if getattr(memory, option)), None)
    what = what or (f"precision={memory.precision!r}" if memory.precision else None)
    if what is None:
        return
    if memory.full_shard == HOST:
        _check_hosts(axes.data)
    of_tables = tables_beside(model, plan)
    for optimizer in optimizers:
        stepped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if is_shardable(optimizer) or all(id(parameter) in of_tables for parameter in stepped):
            continue
        if memory.shard_optimizer or memory.precision or type(optimizer).__module__.startswith("torch.optim"):
            raise PlanError(f"the plan has {what}, but {_why_not(optimizer)}")
        if axes.whole.rank == 0:
            logger.info("%s: of all that full_shard shares out", doubt(type(optimizer)))
    if memory.precision and axes.data.device.type == "cpu" and memory.precision == "fp16":
        raise PlanError("the plan has precision='fp16', which the CPU computes hardly anything in: use 'bf16'")


def _why_not(optimizer: Optimizer) -> str:
    """Why an optimizer cannot step parts, and what could; only what is not torch's own may be said to."""
    kind = type(optimizer)
    mend = f"use one of {', '.join(one.__name__ for one in SHARDABLE)}"
    if isinstance(optimizer, SparseAdam):
        return (
            f"{kind.__name__} takes sparse gradients alone, and steps parameters that are in no table with such: {mend}"
        )
    if is_of_wholes(kind):
        return f"{kind.__name__} looks at whole parameters, not at every number by itself: {mend}"
    return (
        f"{kind.__module__}.{kind.__name__} is not known to treat every number of a parameter by itself: {mend}, or "
        "say that it does by tulle.memory.register_elementwise"
    )


def _check_hosts(axis: Axis) -> None:
    """Refuse hosts whose ranks cannot share parameters out alike."""
    counts = sorted({len(ranks) for ranks in ranks_by_host(axis)})
    if counts == [1] and axis.size > 1:
        raise PlanError(
            f"the plan has full_shard={HOST!r}, but each of {axis.size} hosts has one rank of axis {axis.name!r}, "
            "which would keep all: give full_shard=True, or start several processes on each host"
        )
    if len(counts) > 1:
        raise PlanError(
            f"the plan has full_shard={HOST!r}, but hosts have {counts[0]} to {counts[-1]} ranks of axis "
            f"{axis.name!r}, expected as many on each: give full_shard=True, or start as many processes on each host"
        )


def share_parameters(model: nn.Module, optimizers: Sequence[Optimizer], plan: Plan, axes: Axes) -> None:
    """Share parameters out over axis `data`, or over each host's ranks of it. Every rank of it must call it.

    Nothing is done if the plan does not say so. What repeats is gathered one by one, and the rest of a model, or of a
    placed module, when that runs. Tables stay replicas, or split in their own way.

    Args:
        model: On its stages, its layers split.
        optimizers: Over its parameters; of state that they have, each rank keeps its part.
        plan: What is to be done.
        axes: Of the mesh.
    """
    if not plan.memory.full_shard or axes.data.size == 1:
        return
    stages = placement_of(model)
    placed = {""} if stages is None else set(stages.stages)
    within = {*repeated(model), *_on_one_rank(plan.memory.recompute, plan.stages)}
    units = placed | {name for name in within if any(not other or name.startswith(f"{other}.") for other in placed)}
    tables = tables_beside(model, plan)
    stay = [""] if stages is None else []  # of stages several micro-batches are between forward and backward
    within_hosts = plan.memory.full_shard == HOST
    share_out(model, axes.data, units, leave=tables, stay=stay, optimizers=optimizers, within_hosts=within_hosts)


def tables_beside(model: nn.Module, plan: Plan) -> set[int]:
    """Identities of the tables that a plan, or the run-time, keeps in step or split in a way of their own."""
    return {id(model.get_parameter(name)) for name in {*plan.schemes, *sparse_tables(model)}}


def save_activations(model: nn.Module, plan: Plan) -> None:
    """Have modules recompute, or park on the host, what forward saves for backward."""
    memory = plan.memory
    recomputed = _on_one_rank(memory.recompute, plan.stages)
    # Of parts that are recomputed only inputs could be parked; nn.MultiheadAttention asks whether its are one tensor.
    offloaded = [
        name for name in _on_one_rank(memory.offload, plan.stages) if name in memory.offload or name not in recomputed
    ]
    if recomputed:
        recompute(model, recomputed)
    if offloaded:
        offload(model, offloaded)


def _on_one_rank(names: Sequence[str], stages: Collection[str]) -> list[str]:
    """Modules by name, with those in the place of one that are cut apart from it."""
    found: list[str] = []
    for name in names:
        found += [within for within in stages if not name or within.startswith(f"{name}.")] or [name]
    return found


def shard_states(model: nn.Module, optimizers: Sequence[Optimizer], plan: Plan, axes: Axes) -> None:
    """Have optimizers keep their share of the state, and masters of narrow parameters. After data parallelism."""
    memory = plan.memory
    of_tables = tables_beside(model, plan)
    narrow = memory.narrow
    if not (memory.shard_optimizer or narrow):
        return
    axis = axes.data if memory.shard_optimizer else axes.alone
    for optimizer in optimizers:
        stepped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if any(id(parameter) not in of_tables for parameter in stepped):
            shard_optimizer(optimizer, axis, narrow=narrow, leave=of_tables)
    if narrow is not None:
        for parameter in model.parameters():  # those that no optimizer steps
            if parameter.is_floating_point() and id(parameter) not in of_tables:
                parameter.data = parameter.data.to(narrow)
        compute_in(model, narrow)
