"""A plan's schedule `"auto"` becomes one of the others: on what is distributed, and on the network as it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn
from torch.optim import Optimizer

from tulle.comm import probe
from tulle.distribute.axes import Axes
from tulle.plan import AT_STEP, Plan
from tulle.plan.lateness import schedule_by_cost
from tulle.sync import AUTO
from tulle.traits import ELEMENTWISE, is_compiled


def with_schedule(plan: Plan, model: nn.Module, optimizers: Sequence[Optimizer], axes: Axes) -> Plan:
    """The plan with a schedule that is in force. Every rank must call it, alike: the network may be measured."""
    if plan.schedule != AUTO:
        return plan
    if not can_wait(plan, model, optimizers, axes):
        return replace(plan, schedule=AT_STEP)
    tables = {table.name for table in plan.tables}
    dense_bytes = sum(p.nbytes for name, p in model.named_parameters() if p.requires_grad and name not in tables)
    network = plan.network or probe(axes.data)
    return replace(plan, schedule=schedule_by_cost(plan, dense_bytes, network, axes.data.size), network=network)


def can_wait(plan: Plan, model: nn.Module, optimizers: Sequence[Optimizer], axes: Axes) -> bool:
    """Whether there is something to wait for, and whoever reads a parameter is seen."""
    is_whole = not (axes.splitting or plan.memory.shard_optimizer or plan.memory.full_shard or plan.memory.precision)
    is_seen = not any(is_compiled(one) or isinstance(one, torch.jit.ScriptModule) for one in model.modules())
    return axes.data.size > 1 and is_whole and is_seen and all(type(one) in ELEMENTWISE for one in optimizers)
