"""Puts on what a plan does to save memory."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from tulle.distribute.axes import Axes
from tulle.errors import PlanError
from tulle.memory import compute_in, offload, recompute, shard_optimizer
from tulle.memory.shards import ELEMENTWISE
from tulle.plan import Memory, Plan

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def check_savings(
    memory: Memory, model: nn.Module, optimizers: Sequence[Optimizer], tables: Collection[str], axes: Axes
) -> None:
    """Refuse what cannot be done to this model with these optimizers.

    Args:
        memory: What is asked for.
        model: Not put on ranks yet.
        optimizers: Over its parameters.
        tables: Names of its tables that are kept in step by rows.
        axes: Of the mesh.

    Raises:
        PlanError: Naming the option and the mend.
    """
    if memory.full_shard:
        raise PlanError(
            "the plan has full_shard, which tulle.distribute does not put on yet: use shard_optimizer, or "
            "tulle.memory.shard_fully by itself"
        )
    if not (memory.shard_optimizer or memory.precision):
        return
    what = "shard_optimizer" if memory.shard_optimizer else f"precision={memory.precision!r}"
    of_tables = {id(model.get_parameter(name)) for name in tables}
    for optimizer in optimizers:
        stepped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if all(id(parameter) in of_tables for parameter in stepped):
            continue
        if type(optimizer).__name__ not in ELEMENTWISE:
            raise PlanError(
                f"the plan has {what}, but {type(optimizer).__name__} does not treat every number of a parameter by "
                f"itself: use one of {', '.join(sorted(ELEMENTWISE))}"
            )
        if any(id(parameter) in of_tables for parameter in stepped):
            raise PlanError(
                f"the plan has {what}, and {type(optimizer).__name__} steps tables with sparse gradients, or split "
                "ones, together with others: give the tables an optimizer of their own"
            )
    if memory.precision and axes.data.device.type == "cpu" and memory.precision == "fp16":
        raise PlanError("the plan has precision='fp16', which the CPU computes hardly anything in: use 'bf16'")


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


def shard_states(
    model: nn.Module, optimizers: Sequence[Optimizer], memory: Memory, tables: Collection[str], axes: Axes
) -> None:
    """Have optimizers keep their share of the state, and masters of narrow parameters. After data parallelism."""
    of_tables = {id(model.get_parameter(name)) for name in tables}
    narrow = _DTYPES[memory.precision] if memory.precision else None
    if not (memory.shard_optimizer or narrow):
        return
    axis = axes.data if memory.shard_optimizer else axes.alone
    for optimizer in optimizers:
        stepped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if any(id(parameter) not in of_tables for parameter in stepped):
            shard_optimizer(optimizer, axis, narrow=narrow)
    if narrow is not None:
        compute_in(model, narrow)
