"""Plans of full sharding, and of other ways to have parts, that several tests put on."""

from dataclasses import replace

import torch

import tulle
from tulle.plan import Memory, Plan, plan_for_later

FULL = Memory(full_shard=True)


def planned(kind, shape, memory):
    tables = {"words.weight": (40, 8)} if kind == "words" else {}
    return replace(plan_for_later(shape, tables), memory=memory)


def stepped_in_parts(model, how, stages, table):
    """A model of which each of two ranks has parts, and its optimizer, which has stepped by gradients of ones.

    `how` is "rows", of a table, "full_shard", "model", "pipe", with these stages, or "replicas".
    """
    mesh = tulle.init(**({how: 2} if how in ("model", "pipe") else {"data": 2}))
    plan = Plan(mesh.shape, memory=Memory(full_shard=how == "full_shard"))
    if how == "pipe":
        plan = replace(plan, stages=stages)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    tulle.distribute(model, optimizer, mesh, plan={table: "rows"} if how == "rows" else plan)
    return model, step_by_ones(model, optimizer)


def step_by_ones(model, optimizer):
    """Take a step with gradients of ones; gives the optimizer, which has momentum then."""
    for parameter in model.parameters():
        if not parameter.is_meta:
            parameter.grad = torch.ones_like(parameter.detach())
    optimizer.step()
    return optimizer
