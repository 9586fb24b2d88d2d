"""`distribute`: puts a plan on a model, so that the user's own training loop trains it on all ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tulle.admission import as_optimizers, check_model, check_not_aliased, check_replicated_tables
from tulle.comm import gather_values
from tulle.deferred import give_states, is_deferred
from tulle.distribute.adopted import adopt_model, fetch_after_steps, refuse_hooks
from tulle.distribute.axes import Axes, alike
from tulle.distribute.choosing import Asked, choose, in_force, mesh_for
from tulle.distribute.closures import share_losses
from tulle.distribute.held import Held
from tulle.distribute.lateness import with_schedule
from tulle.distribute.layers import split_layers
from tulle.distribute.replicas import Replicas
from tulle.distribute.savings import check_savings, save_activations, shard_states, share_parameters
from tulle.distribute.spreading import note_spread
from tulle.distribute.stages import follow_stages, put_on_stages
from tulle.distribute.steppers import watch_kinds
from tulle.distribute.watching import watch
from tulle.distribute.whole_states import take_wholes
from tulle.engine import (
    ENGINE,
    DataParallel,
    SplitTable,
    TableSettings,
    broadcast_tensors,
    check_alike,
    check_reads,
    watch_steps,
)
from tulle.errors import PlanError
from tulle.lookups import explain_lookups
from tulle.mesh import Axis, Mesh
from tulle.pipeline import Usual, make_usual
from tulle.pipeline.homes import tensors_of
from tulle.pipeline.schedule import checked
from tulle.placing import check_placements, materialize_parts, place
from tulle.plan import AT_READ, Plan, PlanLike, replayed
from tulle.profiling import profile_later, sparse_tables
from tulle.record import current as current_recorder
from tulle.sync import AUTO, WireDtype, as_wire_dtype
from tulle.tables import TableModule, step_plainly
from tulle.tensor_parallel import guard_parts
from tulle.traits import ELEMENTWISE, is_elementwise

OBSERVE_EVERY = "TULLE_OBSERVE_EVERY"
"""Set by `tulle profile`: measure the gradients of tables in every one of so many steps."""
CHECK_FINITE = "TULLE_CHECK_FINITE"
"""Set by `tulle run --check-finite`."""
M = TypeVar("M", bound=nn.Module)
O = TypeVar("O", bound=Optimizer | Sequence[Optimizer])  # noqa: E741


def distribute(
    model: M,
    optimizer: O,
    mesh: Mesh | None = None,
    *,
    plan: PlanLike = AUTO,
    sample: object = None,
    check_finite: bool = False,
    wire_dtype: WireDtype = None,
) -> tuple[M, O]:
    """Make a model train on all ranks of a mesh, with the numbers of one process. Every rank must call it, alike.

    The training loop stays what it was: every rank runs it, on its own share of each batch. After `loss.backward()`
    each gradient is the mean over the ranks of axis `data`. If the loss is a mean over its batch and all shares are of
    one size, that is the gradient of the whole batch, as one process would compute it.

    At first all ranks take rank 0's parameters and buffers. Buffers that forward writes, such as the statistics of
    batch norm, are set to rank 0's at the end of every backward.

    Args:
        model: On `mesh.device`, or built within `tulle.deferred_init`. It is changed in place: its class gains
            `no_sync()`, as DDP has it, and the names of modules and parameters stay. The parameter of a table that is
            split, and its entry in `state_dict()`, hold only this rank's part; what would take that part for the whole
            table, such as a matrix product with it, raises.
        optimizer: Over parameters of the model, or a list of several (`SparseAdam` for tables, `Adam` for the rest).
        mesh: From `tulle.init`. None takes the mesh that the plan is for; with `plan="auto"` the sizes of its axes are
            chosen by the sample, too. `mesh_of(model)`, imported from `tulle.distribute`, gives that mesh.
        plan: How each tensor is kept in step, split or placed. `"auto"` chooses. The name of a scheme
            (`tulle.sync.SCHEMES`), or `"rows"` or `"columns"` for a split, holds for all tables, and a mapping from
            tables to such names for each of these. Else a `Plan`, or the path of one that was saved. `"anew"` is
            `"auto"`, but takes no plan that an earlier run has kept.
        sample: One batch, as the model is called with it: a mapping is passed as keywords, a tuple as positional
            arguments, anything else as the one argument. With it `"auto"` chooses all that a plan has: it profiles a
            copy of the model for some seconds, unless an earlier run has kept a plan for the same model and mesh.
            Without it `"auto"` chooses only the schemes of tables, by the gradients of the first backward.
        check_finite: Whether to look for NaN and infinity in every gradient, which costs reading it once more. The
            error is raised on every rank and names parameter, rank and step.
        wire_dtype: The dtype in which values of sparse gradients are sent. `"bf16"`, say, sends half of the bytes and
            rounds the values. None takes the plan's, which rounds nothing unless it was made so.

    Returns:
        The model and the optimizer that were given.

    Raises:
        MeshError: If `mesh` is no `Mesh`, or has an axis of several ranks besides `data`, `pipe` and `model`.
        PlanError: If the plan is none of the above, or is for another model or mesh.
        ModelError: If the optimizer is not over parameters of the model, the ranks' models differ (naming the
            parameter), the model is not on the mesh's device, or a table asks for what cannot be had on several ranks
            (`max_norm` with dense gradients).

    Example:
        >>> import torch, tulle
        >>> mesh = tulle.init(data=-1)
        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> model, optimizer = tulle.distribute(model, optimizer, mesh)
        >>> model(torch.ones(2, 4)).mean().backward()
        >>> optimizer.step()
    """
    asked = Asked(replayed(plan), sample, wire_dtype)
    if mesh is None:
        mesh, asked = mesh_for(model, optimizer, asked)
    axes = Axes.of(mesh)
    decided = _decide(model, optimizer, mesh, axes, asked)
    # Until here model and optimizers are as they were given, and what cannot be done was refused on every rank.
    splits = _put_on_ranks(model, decided, axes)
    engine = _make_engine(model, decided, axes, splits, check_finite=check_finite)
    _attach_model(model, engine, decided, axes)
    _attach_optimizers(model, engine, decided, axes)
    refuse_hooks(engine)
    _observe(model, engine, decided, mesh)
    return model, optimizer


@dataclass(frozen=True, slots=True)
class _Decided:
    """What is to be done with a model, the same on all ranks, before it is done.

    Args:
        plan: The plan that is put on it.
        key: Under which the planner keeps that plan, if it made it.
        optimizers: Those that were given, as a list.
        placements: `"rows"` or `"columns"` by name of the table, for tables that are split; none on one rank.
        replicated: Modules that look up in the other tables with sparse gradients, by name of the table.
        is_left_to_gradients: Whether schemes of replicated tables are chosen when their first gradients are there.
    """

    plan: Plan
    key: str
    optimizers: list[Optimizer]
    placements: dict[str, str]
    replicated: dict[str, TableModule]
    is_left_to_gradients: bool


def _decide(
    model: nn.Module, optimizer: Optimizer | Sequence[Optimizer], mesh: Mesh, axes: Axes, asked: Asked
) -> _Decided:
    """Choose what was left open, and refuse on every rank what cannot be done."""
    with alike(axes, "the model"):
        check_model(model, optimizer, mesh)
    optimizers = as_optimizers(optimizer)
    check_alike(model, axes.whole, optimizers)
    chosen = choose(model, optimizers, mesh, asked)
    profile_later(model, optimizers, mesh)  # behind the choice, which copies the model with its hooks
    plan = with_schedule(chosen.plan, model, optimizers, axes)
    placements = plan.placements if axes.data.size > 1 else {}
    with alike(axes, "the plan"):
        _check(plan, placements, model, optimizers, axes)
    replicated = {name: module for name, module in sparse_tables(model).items() if name not in placements}
    is_left = asked.is_auto and not plan.prediction
    return _Decided(plan, chosen.key, optimizers, placements, replicated, is_left_to_gradients=is_left)


def _check(
    plan: Plan, placements: dict[str, str], model: nn.Module, optimizers: Sequence[Optimizer], axes: Axes
) -> None:
    """Refuse what a plan asks for and a model or mesh cannot have."""
    check_placements(placements, model, optimizers, axes.data.size)
    if plan.schedule == AT_READ:
        if axes.splitting:
            raise PlanError(
                f"the plan has the schedule {AT_READ!r}, which is for replicas of whole models, and the mesh splits "
                f"the model over axis {axes.splitting[0].name!r}: use the schedule 'step'"
            )
        check_reads(model)
    if placements or axes.model or (plan.memory.full_shard and axes.data.size > 1):
        check_not_aliased(model)
    if axes.data.size > 1:
        check_replicated_tables(model, placements)
    check_savings(plan, model, optimizers, axes)


def _put_on_ranks(model: nn.Module, decided: _Decided, axes: Axes) -> list[SplitTable]:
    """Have each rank keep what is its own of a model and of its optimizers' states; give the tables that are split."""
    plan, optimizers, placements = decided.plan, decided.optimizers, decided.placements
    parts = _give_values(model, plan, placements, axes)
    split_layers(model, optimizers, plan, axes)
    here = {name: how for name, how in placements.items() if name in parts or not model.get_parameter(name).is_meta}
    splits = place(model, optimizers, here, axes.data, parts)
    give_states(optimizers)
    share_parameters(model, optimizers, plan, axes)
    note_spread(model, plan.memory, axes)
    save_activations(model, plan)
    return splits


def _give_values(model: nn.Module, plan: Plan, placements: dict[str, str], axes: Axes) -> dict[str, Tensor]:
    """Put a model on its stages, and start all ranks from rank 0's values.

    Returns:
        This rank's part of each table that is split, by name, if the model was built without memory.
    """
    parts: dict[str, Tensor] = {}
    if axes.pipe is not None:
        _start_stages(model, axes.pipe)
        sends = placements or (plan.memory.full_shard and axes.data.size > 1)
        within = [axis for axis in (axes.data if sends else None, axes.model) if axis is not None]
        put_on_stages(model, plan, axes, in_order_of=within)
    elif is_deferred(model):
        parts = materialize_parts(model, placements, axes.data, axes.whole)
    held = Held(model)
    whole = [parameter for name, parameter in held.named_parameters() if name not in parts]
    for axis in (axes.data, axes.model):
        if axis is not None:
            broadcast_tensors([*whole, *held.buffers()], axis, label="initial parameters")
    return parts


def _start_stages(model: nn.Module, pipe: Axis) -> None:
    """Give all stages rank 0's values, which alone may have read them, unless a rank has built without memory."""
    if not any(gather_values(is_deferred(model), pipe, label="initial parameters")):
        # By name: a model's own `parameters()` may give some only.
        broadcast_tensors([tensor for _, tensor in tensors_of(model)], pipe, label="initial parameters")


def _make_engine(
    model: nn.Module, decided: _Decided, axes: Axes, splits: Sequence[SplitTable], *, check_finite: bool
) -> Replicas:
    """What keeps replicas in step, and the parts of split tables."""
    return Replicas(
        model,
        axes,
        decided.optimizers,
        decided.plan.memory,
        tables=[name for name in decided.replicated if not model.get_parameter(name).is_meta],  # others' stages
        settings=_settings(decided),
        splits=splits,
        bucket_bytes=decided.plan.bucket_bytes,
        check_finite=check_finite or bool(os.environ.get(CHECK_FINITE)),
    )


def _settings(decided: _Decided) -> TableSettings:
    plan = decided.plan
    schemes = {name: scheme for name, scheme in plan.schemes.items() if name not in plan.placements}
    bounded = {name: module for name, module in decided.replicated.items() if module.max_norm is not None}
    return TableSettings(
        # What auto chose from a sample is chosen anew from gradients, and again when they drift; so is what a plan
        # does not name.
        schemes={} if decided.is_left_to_gradients else schemes,
        renormalize={name: _renormalizer(module) for name, module in bounded.items()},
        wire_dtype=as_wire_dtype(plan.wire_dtype),
        observe_every=int(os.environ.get(OBSERVE_EVERY, "0")),
    )


def _attach_model(model: nn.Module, engine: DataParallel, decided: _Decided, axes: Axes) -> None:
    """Have a model's own calls, steps of micro-batches and parameters know what keeps it in step."""
    plan = decided.plan
    adopt_model(model, engine, plan, axes)
    is_told = axes.pipe is not None and plan.prediction is not None and axes.whole.rank == 0
    make_usual(model, Usual(plan.micro_batches, checked(plan.pipeline_schedule), is_told))
    if axes.pipe is not None:
        follow_stages(model, engine)
    guard_parts(model)


def _attach_optimizers(model: nn.Module, engine: DataParallel, decided: _Decided, axes: Axes) -> None:
    """Have optimizers step what is kept in step, when it is there, and load and keep their part of states."""
    plan, optimizers = decided.plan, decided.optimizers
    watch_kinds()
    if axes.data.size > 1:
        watch_steps()
        for one in optimizers:
            if type(one) not in ELEMENTWISE:
                share_losses(one, axes.data)
    for one in optimizers:
        vars(one)[ENGINE] = engine  # modules of the model hold it too, but one may train without them
        step_plainly(one, is_elementwise=is_elementwise(one))
    if engine.split_tables is not None:
        fetch_after_steps(optimizers, engine)
    if plan.schedule == AT_READ and axes.data.size > 1:
        late = engine.update_late()
        is_sharded = plan.memory.shard_optimizer or plan.memory.narrow is not None  # which reads all before it steps
        for one in optimizers:
            late.attach(one, is_elementwise=type(one) in ELEMENTWISE and not is_sharded)
    take_wholes(model, optimizers, axes)
    shard_states(model, optimizers, plan, axes)


def _observe(model: nn.Module, engine: DataParallel, decided: _Decided, mesh: Mesh) -> None:
    """Have lookups explain what they raise, and the run be watched and recorded."""
    explain_lookups(model, mesh.rank)
    if mesh.rank == 0:
        watch(decided.plan, model, decided.optimizers[-1], key=decided.key)
    recorder = current_recorder()
    if recorder is not None:
        plan_now = partial(in_force, decided.plan, model, engine)
        recorder.attach(model, decided.optimizers, mesh, plan=plan_now, engine=engine)


def _renormalizer(module: TableModule) -> Callable[[Tensor], None]:
    """What the lookup of an embedding with `max_norm` does to its rows, for the rows that other ranks looked up.

    A row that was renormalized already is within the norm and stays as it is.
    """

    @torch.no_grad()
    def renormalize(rows: Tensor) -> None:
        assert module.max_norm is not None, "only embeddings with max_norm renormalize"
        torch.embedding_renorm_(module.weight, rows, module.max_norm, module.norm_type)

    return renormalize
