"""`distribute`: puts a plan on a model, so that the user's own training loop trains it on all ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tulle.admission import as_optimizers, check_model, check_replicated_tables, data_axis
from tulle.comm import gather_values, probe, raise_together
from tulle.deferred import is_deferred
from tulle.engine import (
    ENGINE,
    DataParallel,
    TableModule,
    TableSettings,
    adopt,
    broadcast_tensors,
    check_alike,
    check_reads,
    engine_of,
)
from tulle.errors import PlanError, TulleError
from tulle.lookups import explain_lookups
from tulle.mesh import Axis, Mesh
from tulle.placing import ELEMENTWISE, check_placements, materialize_parts, outputs_of, place, tables_of, why_whole
from tulle.plan import AT_READ, Candidate, Plan, PlanLike, plan_as_given, plan_by_cost, plan_for_later
from tulle.profile import rows_touched, sparse_tables, trained_tables
from tulle.record import current as current_recorder
from tulle.softmax import offers
from tulle.sync import AUTO, Table, WireDtype, as_wire_dtype, gather_presence
from tulle.tables import PLACEMENTS, split_of

_CLASS = "_tulle_class"
"""Where a distributed model keeps the class that it was given with."""
_PLAN = "_tulle_plan"
OBSERVE_EVERY = "TULLE_OBSERVE_EVERY"
"""Set by `tulle profile`: measure the gradients of tables in every one of so many steps."""
CHECK_FINITE = "TULLE_CHECK_FINITE"
"""Set by `tulle run --check-finite`."""
M = TypeVar("M", bound=nn.Module)
O = TypeVar("O", bound=Optimizer | Sequence[Optimizer])  # noqa: E741


class Distributed:
    """What `distribute` adds to a model's class, as `fully_shard` does."""

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let gradients add up on each rank within this context, without communication, as DDP's `no_sync`.

        The first backward outside sends the sums. For gradient accumulation: all micro-batches but the last within.
        """
        with self.__dict__[ENGINE].no_sync():
            yield

    def __reduce_ex__(self, protocol: object) -> tuple[object, ...]:
        """A copy, or a pickle, is the plain model that was given to `distribute`."""
        given = super().__getstate__()
        state = given if isinstance(given, dict) else self.__dict__
        kept = {name: value for name, value in state.items() if name not in (ENGINE, _PLAN, _CLASS)}
        return _empty, (self.__dict__[_CLASS],), kept


def distribute(
    model: M,
    optimizer: O,
    mesh: Mesh,
    *,
    plan: PlanLike = AUTO,
    sample: object = None,
    check_finite: bool = False,
    wire_dtype: WireDtype = None,
) -> tuple[M, O]:
    """Make a model train on all ranks of a mesh, with the numbers of one process. Every rank must call it, alike.

    Afterwards every rank runs the same loop on its share of each batch; after `loss.backward()` gradients are the
    mean over axis `data`, so a loss that is a mean over its batch, with shares of one size, gives what one process
    would compute on the whole batch. Parameters and buffers start from rank 0's; buffers that were written since the
    last backward (batch norm's statistics) follow rank 0's from its end on.

    Args:
        model: On `mesh.device`, or built within `tulle.deferred_init`. The same object comes back: its class gains
            `no_sync()`; names stay. Of a table that is split, parameter and `state_dict` hold this rank's part.
        optimizer: Over parameters of the model, or a list of several (`SparseAdam` for tables, `Adam` for the rest).
        mesh: From `tulle.init`, with an axis `data`.
        plan: `"auto"`, a scheme for all tables, a mapping from table to scheme, a `Plan`, or the path of a saved one.
        sample: One batch as the model is called with it: a mapping is passed as keywords, a tuple as positional
            arguments, anything else as the one argument. With it `"auto"` chooses now, else after the first backward.
        check_finite: Whether to raise on every rank, naming parameter, rank and step, when a gradient is not finite.
            It reads every gradient back.
        wire_dtype: In which the values of sparse gradients travel, `"bf16"` say, which loses what it does not hold.
            None is what the plan says, and loses nothing unless that plan was asked to.

    Returns:
        The model and the optimizer that were given.

    Raises:
        MeshError: If the mesh has no axis `data`.
        PlanError: If the plan is none of the above, or is for another model or mesh.
        ModelError: If optimizer and model do not belong together, the ranks' models differ (naming the parameter), the
            model is not on the mesh's device, or a table needs what is not there (`max_norm` with dense gradients).

    Example:
        >>> import torch, tulle
        >>> mesh = tulle.init(data=-1)
        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> model, optimizer = tulle.distribute(model, optimizer, mesh)
        >>> model(torch.ones(2, 4)).mean().backward()
        >>> optimizer.step()
    """
    axis = data_axis(mesh)
    with _alike(mesh, "the model"):
        check_model(model, optimizer, mesh)
    check_alike(model, axis)
    optimizers = as_optimizers(optimizer)
    decided = _decide(model, optimizers, mesh, plan=plan, sample=sample, lossy=wire_dtype)
    placements = decided.placements if axis.size > 1 else {}
    with _alike(mesh, "the plan"):
        check_placements(placements, model, optimizers, axis.size)
        if decided.schedule == AT_READ:
            check_reads(model)
        if axis.size > 1:
            check_replicated_tables(model, placements)
    shards = materialize_parts(model, placements, axis) if is_deferred(model) else {}
    whole = [parameter for name, parameter in model.named_parameters() if name not in shards]
    broadcast_tensors([*whole, *model.buffers()], axis, label="initial parameters")
    tables = {name: module for name, module in sparse_tables(model).items() if name not in placements}
    splits = place(model, optimizers, placements, axis, shards)
    bounded = {name: module for name, module in tables.items() if module.max_norm is not None}
    engine = DataParallel(
        model,
        axis,
        tables=list(tables),
        settings=TableSettings(
            # What auto chose from a sample is chosen anew from gradients, and again when they drift.
            schemes={} if plan == AUTO else {name: decided.schemes[name] for name in tables},
            renormalize={name: _renormalizer(module) for name, module in bounded.items()},
            wire_dtype=as_wire_dtype(decided.wire_dtype),
            observe_every=int(os.environ.get(OBSERVE_EVERY, "0")),
        ),
        splits=splits,
        bucket_bytes=decided.bucket_bytes,
        check_finite=check_finite or bool(os.environ.get(CHECK_FINITE)),
    )
    _adopt(model, engine, decided)
    for one in optimizers if axis.size > 1 else ():
        one.register_step_pre_hook(
            lambda stepped, *_: engine.check_covered(p for group in stepped.param_groups for p in group["params"])
        )
    if engine.split_tables is not None:
        _after_steps(optimizers, engine)
    if decided.schedule == AT_READ and axis.size > 1:
        late = engine.update_late()
        for one in optimizers:
            late.attach(one, is_elementwise=type(one) in ELEMENTWISE)
    explain_lookups(model, axis.rank)
    recorder = current_recorder()
    if recorder is not None:
        recorder.attach(model, optimizers, mesh, plan=lambda: in_force(decided, engine), engine=engine)
    return model, optimizer


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
        return in_force(model.__dict__[_PLAN], engine)
    with _alike(mesh, "the model"):
        check_model(model, optimizer, mesh)
    return _decide(model, as_optimizers(optimizer), mesh, plan=AUTO, sample=sample, lossy=wire_dtype)


def in_force(plan: Plan, engine: DataParallel) -> Plan:
    """The plan with the choices that the run has made since."""
    chosen, measured = engine.choices(), engine.measured()
    tables = [table.with_choice(chosen.get(table.name), measured.get(table.name)) for table in plan.tables]
    return replace(plan, tables=tuple(tables), network=plan.network or engine.network)


def _decide(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    mesh: Mesh,
    *,
    plan: PlanLike,
    sample: object,
    lossy: WireDtype,
) -> Plan:
    """The plan that the arguments stand for, the same on all ranks."""
    axis = data_axis(mesh)
    tables = sparse_tables(model)
    shapes = {name: (module.num_embeddings, module.embedding_dim) for name, module in tables.items()}
    others = {name: _shape(model, name) for name in tables_of(model) if name not in tables}
    with _alike(mesh, "the plan"):
        decided = plan_as_given(plan, mesh.shape, shapes, others)
        wire_dtype = as_wire_dtype(lossy or (decided.wire_dtype if decided else None))
    wire_name = str(wire_dtype).removeprefix("torch.") if wire_dtype else None
    if decided is not None:
        decided = replace(decided, wire_dtype=wire_name)
    heard = gather_values(
        (decided.to_json() if decided else (AUTO, wire_name), sample is not None), axis, label="the plan"
    )
    for rank, (other, _) in enumerate(heard):
        if other != heard[0][0]:
            raise PlanError(f"rank {rank} was given the plan {other}, rank 0 {heard[0][0]}: give all ranks the same")
    if decided is not None:
        return decided
    split = {name: "a softmax is computed where its rows lie" for name in outputs_of(model)}
    if is_deferred(model):
        splittable = [
            name for name in tables_of(model) if why_whole(name, model, optimizers, "rows", axis.size) is None
        ]
        split = dict.fromkeys(splittable, "the model was built without memory") | split
    if all(has_sample for _, has_sample in heard) and trained_tables(model) and not is_deferred(model):
        candidates = _measure(model, optimizers, axis, sample, wire_dtype)
        decided = plan_by_cost(mesh.shape, candidates, probe(axis), axis.size)
    else:
        decided = plan_for_later(mesh.shape, shapes)
    for name, reason in split.items():
        decided = decided.with_rows_split({name: _shape(model, name)}, reason)
    return replace(decided, wire_dtype=wire_name, offers=tuple(offers(model, axis.size)) if axis.size > 1 else ())


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


@contextmanager
def _alike(mesh: Mesh, label: str) -> Iterator[None]:
    """Raise on every rank what the body raises on any."""
    axis = data_axis(mesh)
    error: TulleError | None = None
    try:
        yield
    except TulleError as found:
        error = found
    raise_together(error, axis, label=label)


def _renormalizer(module: TableModule) -> Callable[[Tensor], None]:
    """What the lookup of an embedding with `max_norm` does to its rows, for the rows that other ranks looked up.

    A row that was renormalized already is within the norm and stays as it is.
    """

    @torch.no_grad()
    def renormalize(rows: Tensor) -> None:
        assert module.max_norm is not None, "only embeddings with max_norm renormalize"
        torch.embedding_renorm_(module.weight, rows, module.max_norm, module.norm_type)

    return renormalize


def _adopt(model: nn.Module, engine: DataParallel, plan: Plan) -> None:
    if engine.split_tables is not None:
        for module in model.modules():
            if isinstance(module, TableModule) and split_of(module.weight) is not None:
                adopt(module, engine.split_tables)
        model.register_forward_pre_hook(_begin_call, with_kwargs=True)
        model.register_forward_hook(_end_call, always_call=True)
    plain = type(model)
    # Past Module.__setattr__, which is for parameters, buffers and submodules.
    model.__dict__.update({ENGINE: engine, _PLAN: plan, _CLASS: plain})
    adopted: type[nn.Module] = type(plain.__name__, (Distributed, plain), {"__module__": plain.__module__})
    object.__setattr__(model, "__class__", adopted)


# Functions of the model, not bound methods: a model that is copied takes its hooks along, but not its engine.
def _begin_call(model: nn.Module, arguments: tuple[object, ...], keywords: dict[str, object]) -> None:
    engine = engine_of(model)
    if engine is not None and engine.split_tables is not None and model.training and torch.is_grad_enabled():
        engine.split_tables.begin_call((arguments, keywords))


def _end_call(model: nn.Module, *_: object) -> None:
    engine = engine_of(model)
    if engine is not None and engine.split_tables is not None:
        engine.split_tables.end_call()


def _after_steps(optimizers: Sequence[Optimizer], engine: DataParallel) -> None:
    """Have the rows of the next step fetched when the last optimizer of split tables has stepped."""
    tables = engine.split_tables
    assert tables is not None, "called for models with split tables"
    parted = {id(table.parameter) for table in tables.tables.values()}
    stepping = [one for one in optimizers if parted & {id(p) for group in one.param_groups for p in group["params"]}]
    waiting = {id(one) for one in stepping}

    def stepped(optimizer: Optimizer, *_: object) -> None:
        waiting.discard(id(optimizer))
        if not waiting:
            waiting.update(id(one) for one in stepping)
            tables.after_step()

    for one in stepping:
        one.register_step_post_hook(stepped)


def _empty(kind: type[nn.Module]) -> nn.Module:
    return kind.__new__(kind)
