"""From what was asked for, or measured, to the plan that all ranks of a mesh go by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn
from torch.optim import Optimizer

from tulle.admission import as_optimizers, check_model
from tulle.comm import gather_values, probe
from tulle.deferred import is_deferred
from tulle.distribute.adopted import plan_of
from tulle.distribute.axes import Axes, alike
from tulle.distribute.stages import dealt_stages
from tulle.engine import DataParallel, engine_of
from tulle.errors import PlanError
from tulle.mesh import Axis, Mesh
from tulle.placing import outputs_of, tables_of, why_whole
from tulle.plan import Candidate, Plan, PlanLike, plan_as_given, plan_by_cost, plan_for_later
from tulle.profiling import rows_touched, sparse_tables, trained_tables
from tulle.softmax import offers
from tulle.sync import AUTO, Table, WireDtype, as_wire_dtype, gather_presence
from tulle.tables import PLACEMENTS


def make_plan(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    mesh: Mesh,
    *,
    sample: object = None,
    wire_dtype: WireDtype = None,
) -> Plan:
    """Measure and choose, as `distribute` would with `plan="auto"`, without touching the model: `tulle.plan`.

    Every rank must call it, with its own sample. Arguments and errors are those of `distribute`. Of a model that was
    distributed it gives the plan in force, with what each choice was seen to take.

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
        return in_force(plan_of(model), engine)
    axes = Axes.of(mesh)
    with alike(axes, "the model"):
        check_model(model, optimizer, mesh)
    return choose(model, as_optimizers(optimizer), mesh, plan=AUTO, sample=sample, lossy=wire_dtype)


def in_force(plan: Plan, engine: DataParallel) -> Plan:
    """The plan with the choices that the run has made since."""
    chosen, measured = engine.choices(), engine.measured()
    tables = [table.with_choice(chosen.get(table.name), measured.get(table.name)) for table in plan.tables]
    return replace(plan, tables=tuple(tables), network=plan.network or engine.network)


def choose(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    mesh: Mesh,
    *,
    plan: PlanLike,
    sample: object,
    lossy: WireDtype,
) -> Plan:
    """The plan that the arguments stand for, the same on all ranks, each of which must call it."""
    axes = Axes.of(mesh)
    tables = sparse_tables(model)
    shapes = {name: (module.num_embeddings, module.embedding_dim) for name, module in tables.items()}
    others = {name: _shape(model, name) for name in tables_of(model) if name not in tables}
    with alike(axes, "the plan"):
        decided = plan_as_given(plan, mesh.shape, shapes, others)
        if decided is not None:
            decided.check(mesh.shape, {**shapes, **others}, {name for name, _ in model.named_modules()})
        wire_dtype = as_wire_dtype(lossy or (decided.wire_dtype if decided else None))
    wire_name = str(wire_dtype).removeprefix("torch.") if wire_dtype else None
    if decided is not None:
        decided = replace(decided, wire_dtype=wire_name)
    heard = gather_values(
        (decided.to_json() if decided else (AUTO, wire_name), sample is not None), axes.whole, label="the plan"
    )
    for rank, (other, _) in enumerate(heard):
        if other != heard[0][0]:
            raise PlanError(f"rank {rank} was given the plan {other}, rank 0 {heard[0][0]}: give all ranks the same")
    have_samples = all(has_sample for _, has_sample in heard)
    if decided is None:
        decided = _chosen(model, optimizers, mesh, sample if have_samples else None, wire_dtype)
        decided = replace(decided, wire_dtype=wire_name)
        decided = gather_values(decided, axes.whole, label="the plan")[0]  # each line along axis data has measured
    return dealt_stages(decided, model, axes, sample if have_samples else None)


def _chosen(
    model: nn.Module, optimizers: Sequence[Optimizer], mesh: Mesh, sample: object, wire_dtype: torch.dtype | None
) -> Plan:
    axes = Axes.of(mesh)
    axis = axes.data
    split = {name: "a softmax is computed where its rows lie" for name in outputs_of(model)}
    if is_deferred(model) and axes.pipe is None:  # stages need not be built whole either
        splittable = [
            name for name in tables_of(model) if why_whole(name, model, optimizers, "rows", axis.size) is None
        ]
        split = dict.fromkeys(splittable, "the model was built without memory") | split
    if sample is not None and trained_tables(model) and not is_deferred(model):
        candidates = _measure(model, optimizers, axis, sample, wire_dtype)
        decided = plan_by_cost(mesh.shape, candidates, probe(axis), axis.size)
    else:
        tables = sparse_tables(model)
        shapes = {name: (module.num_embeddings, module.embedding_dim) for name, module in tables.items()}
        decided = plan_for_later(mesh.shape, shapes)
    for name, reason in split.items():
        decided = decided.with_rows_split({name: _shape(model, name)}, reason)
    return replace(decided, offers=tuple(offers(model, axis.size)) if axis.size > 1 else ())


def _shape(model: nn.Module, name: str) -> tuple[int, int]:
    rows, width = model.get_parameter(name).shape
    return rows, width


def _measure(
    model: nn.Module, optimizers: Sequence[Optimizer], axis: Axis, sample: object, wire_dtype: torch.dtype | None
) -> dict[str, Candidate]:
    """What the gradients of the tables look like on all ranks, and how each can be split."""
    modules = trained_tables(model)
    touched = rows_touched(model, sample)
    heard = gather_values({name: len(rows) for name, rows in touched.items()}, axis, label="rows touched")
    tables = [
        Table(name, m.num_embeddings, m.embedding_dim, m.weight.dtype, axis.device, wire_dtype)
        for name, m in modules.items()
    ]
    counts = [[rows[table.name] for table in tables] for rows in heard]
    presences = gather_presence([touched[table.name] for table in tables], tables, counts, axis)
    return {
        table.name: Candidate(
            table.characteristics([rows[t] for rows in counts], presences[t]),
            tuple(how for how in PLACEMENTS if why_whole(table.name, model, optimizers, how, axis.size) is None),
            is_dense=not modules[table.name].sparse,
        )
        for t, table in enumerate(tables)
    }
