"""From what was asked for, or measured, to the plan that all ranks of a mesh go by."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from tulle.admission import as_optimizers, check_model
from tulle.comm import gather_values, probe
from tulle.deferred import is_deferred
from tulle.distribute.adopted import plan_of
from tulle.distribute.axes import Axes, alike
from tulle.distribute.planned import Planned, Wanted, planned, split_anyway
from tulle.distribute.stages import dealt_stages
from tulle.engine import DataParallel, engine_of
from tulle.errors import PlanError
from tulle.mesh import Axis, Mesh, init
from tulle.pipeline.homes import by_first_names
from tulle.placing import placements_of, shape_of, tables_of
from tulle.plan import Candidate, Plan, PlanLike, plan_as_given, plan_by_cost, plan_for_later
from tulle.plan.plan import MODEL
from tulle.plan.table_plan import TablePlan
from tulle.profiling import sparse_tables, trained_tables
from tulle.profiling.refusals import together
from tulle.profiling.tables import looked_up
from tulle.softmax import offers
from tulle.sync import AUTO, Table, WireDtype, as_wire_dtype, gather_presence
from tulle.tables import table_modules

ANEW = "anew"
"""As a plan: `"auto"`, but what was kept of an earlier run does not count."""
MAKE_ANEW = "TULLE_ANEW"
"""Set by `tulle run --anew`: `"auto"` is `"anew"`."""
_SHOWN = 5
"""Of what two plans do differently."""
_OFFER = "everything is chosen, from a profile that takes seconds, if sample= is a batch that the model trains on"
_MUCH_BYTES = 4 << 20
"""Of dense gradients of tables, from which on they are told of."""
logger = logging.getLogger("tulle")


def make_plan(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    mesh: Mesh | None = None,
    *,
    sample: object = None,
    wire_dtype: WireDtype = None,
) -> Plan:
    """Measure and choose, as `distribute` would with `plan="auto"`, without touching the model: `tulle.plan`.

    Every rank must call it, with its own sample.

    Args:
        model: As for `distribute`. For a model that is distributed already, the plan in force is returned, with what
            each choice was measured to take.
        optimizer: Over parameters of the model, or a list of several.
        mesh: From `tulle.init`. None chooses the sizes of its axes, too, for `tulle.init(**plan.mesh)`; the batch of a
            step is then what the samples of all ranks make up together.
        sample: One batch, as for `distribute`. None leaves the schemes of tables to the first backward, and chooses
            nothing else.
        wire_dtype: The dtype in which values of sparse gradients are to be sent; None for their own.

    Returns:
        A `Plan`, the same on all ranks: for `distribute`, `plan.save(path)` or `print(plan.explain())`.

    Raises:
        MeshError: As `distribute`.
        ModelError: As `distribute`.
        PlanError: If no plan fits, or ranks ask for different ones.

    Example:
        >>> import torch, tulle
        >>> mesh = tulle.init(data=-1)
        >>> model = torch.nn.EmbeddingBag(1000, 16, sparse=True)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> tulle.plan(model, optimizer, mesh, sample=torch.tensor([[1, 2, 2]])).tables[0].density
        0.002
    """
    engine = engine_of(model)
    if engine is not None:
        return in_force(plan_of(model), model, engine)
    whole = init() if mesh is None else mesh
    with alike(Axes.of(whole), "the model"):
        check_model(model, optimizer, whole)
    asked = Asked(AUTO, sample, wire_dtype, is_free=mesh is None)
    return choose(model, as_optimizers(optimizer), whole, asked).plan


@dataclass(frozen=True, slots=True)
class Asked:
    """What the arguments of `distribute` ask for.

    Args:
        plan: As it was given, or what was chosen for it already.
        sample: This rank's, None if it has none.
        lossy: In which the values of sparse gradients are to travel.
        is_free: Whether the mesh is to be chosen.
    """

    plan: PlanLike | Chosen
    sample: object = None
    lossy: WireDtype = None
    is_free: bool = False

    @property
    def is_auto(self) -> bool:
        """Whether everything is to be chosen, or was."""
        return isinstance(self.plan, Chosen) or (isinstance(self.plan, str) and self.plan in (AUTO, ANEW))

    @property
    def is_anew(self) -> bool:
        """Whether what was kept of earlier runs does not count."""
        return self.plan == ANEW or (self.is_auto and bool(os.environ.get(MAKE_ANEW)))


@dataclass(frozen=True, slots=True)
class Chosen:
    """The plan that was chosen, and the key under which it is kept, if the planner made it."""

    plan: Plan
    key: str = ""


def in_force(plan: Plan, model: nn.Module, engine: DataParallel) -> Plan:
    """The plan of a model with the choices that the run has made since, also for dense gradients that go by rows."""
    chosen, measured = engine.ledger.choices, engine.ledger.measured
    known = {table.name: table for table in plan.tables}
    unnamed = chosen.keys() - known.keys()
    if unnamed and plan.mesh.get(MODEL, 1) == 1:  # of which the layers keep tables whole that a plan names
        known |= {name: TablePlan(name, *shape_of(model, name), AUTO) for name in tables_of(model) if name in unnamed}
    tables = [table.with_choice(chosen.get(table.name), measured.get(table.name)) for table in known.values()]
    return replace(plan, tables=tuple(tables), network=plan.network or engine.ledger.network)


def choose(model: nn.Module, optimizers: Sequence[Optimizer], mesh: Mesh, asked: Asked) -> Chosen:
    """The plan that the arguments stand for, the same on all ranks, each of which must call it."""
    axes = Axes.of(mesh)
    with alike(axes, "the plan"):
        given = _given(asked, model, mesh)
        told = given.plan.to_json() if given else (ANEW if asked.is_anew else AUTO, _wire_name(asked.lossy))
    heard = gather_values((told, asked.sample is not None), axes.whole, label="the plan")
    for rank, (other, _) in enumerate(heard):
        if other != heard[0][0]:
            raise PlanError(f"{_apart(other, heard[0][0], rank)}: give all ranks the same")
    sample = asked.sample if all(has_sample for _, has_sample in heard) else None
    chosen = given or _choose_now(model, optimizers, mesh, replace(asked, sample=sample))
    return replace(chosen, plan=dealt_stages(chosen.plan, model, axes, sample))


def _given(asked: Asked, model: nn.Module, mesh: Mesh) -> Chosen | None:
    """The plan that was given, or was chosen with its mesh; None if one is still to be chosen.

    Raises:
        PlanError: If it is for another model or mesh.
    """
    sparse = {name: (module.num_embeddings, module.embedding_dim) for name, module in sparse_tables(model).items()}
    others = {name: shape_of(model, name) for name in tables_of(model) if name not in sparse}
    if isinstance(asked.plan, Chosen):
        given = asked.plan
    else:
        plan = None if asked.is_auto else plan_as_given(asked.plan, mesh.shape, sparse, others)
        given = Chosen(plan) if plan else None
    if given is None:
        return None
    plan = replace(given.plan, stages=by_first_names(model, given.plan.stages))
    plan.check(mesh.shape, {**sparse, **others}, dict(model.named_modules()))
    return replace(given, plan=replace(plan, wire_dtype=_wire_name(asked.lossy or plan.wire_dtype)))


def _wire_name(wire_dtype: WireDtype) -> str | None:
    dtype = as_wire_dtype(wire_dtype)
    return str(dtype).removeprefix("torch.") if dtype else None


def _apart(given: Any, first: Any, rank: int) -> str:
    """How what a rank was given, a plan as JSON or a word with the dtype on the wire, differs from what rank 0 was."""
    if not (isinstance(given, dict) and isinstance(first, dict)):
        shown = [
            "a plan" if isinstance(one, dict) else f"{one[0]!r} with wire_dtype={one[1]}" for one in (given, first)
        ]
        return f"rank {rank} was given {shown[0]}, rank 0 {shown[1]}"
    lines = Plan.from_json(given).diff(Plan.from_json(first))
    measured = ", ".join(name for name, value in given.items() if value != first[name])
    more = f"; and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
    return (
        f"rank {rank} was given another plan than rank 0, {'; '.join(lines[:_SHOWN])}{more}"
        if lines
        else f"rank {rank} was given the plan of rank 0 with another {measured}"
    )


def mesh_for(model: nn.Module, optimizer: Optimizer | Sequence[Optimizer], asked: Asked) -> tuple[Mesh, Asked]:
    """The mesh of a plan that was given, or one that is chosen with its plan, and what is asked for on it.

    Every rank must call it.
    """
    whole = init()
    plan = asked.plan
    with alike(Axes.of(whole), "the model"):
        check_model(model, optimizer, whole)
        if isinstance(plan, os.PathLike) or (isinstance(plan, str) and plan.endswith(".json")):
            plan = Plan.load(plan)
        if isinstance(plan, Plan):
            plan.check_values()
    if asked.is_auto:
        plan = choose(model, as_optimizers(optimizer), whole, replace(asked, is_free=True))
    decided, asked = plan.plan if isinstance(plan, Chosen) else plan, replace(asked, plan=plan)
    if not isinstance(decided, Plan) or dict(decided.mesh) == whole.shape:
        return whole, asked
    sizes: dict[str, Any] = dict(decided.mesh)
    return init(**sizes), asked


def _choose_now(model: nn.Module, optimizers: Sequence[Optimizer], mesh: Mesh, asked: Asked) -> Chosen:
    """By the planner if there is a sample, and others to share the work with; else tables only. Rank 0's counts."""
    axes = Axes.of(mesh)
    found = Planned(None)
    if asked.sample is not None and axes.whole.size > 1:
        found = planned(Wanted(model, optimizers, mesh, asked.sample, asked.is_anew, asked.is_free))
        if found.plan is None and axes.whole.rank == 0:
            logger.warning("only what happens to tables is chosen, because %s", found.reason)
    decided = found.plan or _by_tables(model, optimizers, axes.data, mesh, asked)
    split = split_anyway(model, optimizers, axes)
    for name in (name for name in split if decided.placements.get(name) != "rows"):
        decided = decided.with_rows_split({name: shape_of(model, name)}, split[name])
    offered = [*decided.offers, *(offers(model, axes.data.size) if axes.data.size > 1 else [])]
    if asked.sample is None and axes.whole.rank == 0 and axes.data.size > 1:
        say_what_is_dense(model)
    if axes.whole.size > 1 and found.plan is None:
        offered = [*offered, _OFFER if asked.sample is None else f"{_OFFER}; with this one {found.reason}"]
    mine = replace(decided, offers=tuple(offered), wire_dtype=_wire_name(asked.lossy))
    plan = gather_values(mine, axes.whole, label="the plan")[0]  # each line along axis data has measured
    return Chosen(plan, found.key if found.plan else "")


def say_what_is_dense(model: nn.Module) -> None:
    """Log which tables have dense gradients, if these are most of what is sent: without a sample they are not split.

    Tables that another layer has, too, as an output layer has, are left out: all of their rows get gradients.
    """
    tables, lookups = trained_tables(model), {id(module) for _, module, _ in table_modules(model)}
    others = {id(one) for each in model.modules() if id(each) not in lookups for one in each._parameters.values()}
    dense = {name: one.weight.nbytes for name, one in tables.items() if not one.sparse and id(one.weight) not in others}
    trained = sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)
    if sum(dense.values()) > max(_MUCH_BYTES, trained / 2):
        logger.info(
            "the gradients of %s are dense, %.0f of %.0f MB of all: rows that are not zero are sent where that is "
            "faster; a batch as sample= has tulle choose whether to split these tables",
            ", ".join(dense),
            sum(dense.values()) / 1e6,
            trained / 1e6,
        )


def _by_tables(model: nn.Module, optimizers: Sequence[Optimizer], axis: Axis, mesh: Mesh, asked: Asked) -> Plan:
    """What happens to tables: by what the sample looks up, or left to their first gradients."""
    if asked.sample is not None and trained_tables(model) and not is_deferred(model):
        candidates = _measure(model, optimizers, axis, asked.sample, as_wire_dtype(asked.lossy))
        return plan_by_cost(mesh.shape, candidates, probe(axis), axis.size)
    shapes = {name: (one.num_embeddings, one.embedding_dim) for name, one in sparse_tables(model).items()}
    return plan_for_later(mesh.shape, shapes)


def _measure(
    model: nn.Module, optimizers: Sequence[Optimizer], axis: Axis, sample: object, wire_dtype: torch.dtype | None
) -> dict[str, Candidate]:
    """What the gradients of the tables look like on all ranks, and how each can be split."""
    modules = trained_tables(model)
    seen = together(lambda: looked_up(model, sample), model, sample, axis)
    told = gather_values({name: (len(one.rows), one.is_read) for name, one in seen.items()}, axis, label="rows touched")
    heard = [{name: rows for name, (rows, _) in of_rank.items()} for of_rank in told]
    read = {name for of_rank in told for name, (_, is_read) in of_rank.items() if is_read}
    tables = [
        Table(name, m.num_embeddings, m.embedding_dim, m.weight.dtype, axis.device, wire_dtype)
        for name, m in modules.items()
    ]
    counts = [[rows[table.name] for table in tables] for rows in heard]
    presences = gather_presence([seen[table.name].rows for table in tables], tables, counts, axis)
    placements = placements_of(model, optimizers, axis.size, is_seen=True)
    return {
        table.name: Candidate(
            table.characteristics([rows[t] for rows in counts], presences[t]),
            () if table.name in read else placements[table.name],
            is_dense=not modules[table.name].sparse,
        )
        for t, table in enumerate(tables)
    }
