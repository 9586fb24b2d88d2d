"""`profile`: measures what a model's training step does, on one process or on all ranks of a mesh at once.

A copy of the model and of its optimizer takes real steps, some with a watch at the ends of its modules, so that what
pieces take adds up to the step. On a mesh all ranks take their steps at once, each on its own samples, and the slowest
rank of each step counts: a step with synchronization waits for it.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from tulle.comm import gather_values, probe
from tulle.deferred import is_deferred
from tulle.kept_memory import keep_memory
from tulle.memory.estimate import default_loss
from tulle.mesh import Axis, Mesh, axis_of
from tulle.pipeline.partition import COPIES
from tulle.pipeline.profile import profile as profile_pieces
from tulle.pipeline.randomness import State
from tulle.pipeline.unfit import kinds_of, refuse_lazy, refuse_replaced, refuse_scripted, refuse_sending
from tulle.pipeline.untouched import untouched
from tulle.profiling.calls import with_run_time
from tulle.profiling.counts import Counts, count
from tulle.profiling.crowding import crowding
from tulle.profiling.machine import NOMINAL, measure_cluster, memory_bytes
from tulle.profiling.optimizer import optimizer_profile, tried
from tulle.profiling.pieces import STAGES, Pieces, bytes_of, cut, owners_of
from tulle.profiling.refusals import check_arguments, check_as_many, check_trains, together
from tulle.profiling.samples import samples_in
from tulle.profiling.splits import splits
from tulle.profiling.steps import Loss, Twin
from tulle.profiling.table_profiles import Looks, looks, table_profiles
from tulle.profiling.timing import fixed_share, timed
from tulle.profiling.weights import timed_weights
from tulle.workload import Cluster, Machine, ModuleProfile, Profile

_SHARE_OF_MEMORY = 0.5
_BACKWARD_SHARE = 2 / 3
"""Of forward and backward together, where only their sum is known: a matrix product has two in backward."""
NOWHERE = Cluster(1, 1, Machine(1.0, 1.0), NOMINAL)
"""Where a profile is of until the machine was measured, which is done behind the steps."""
_LABEL = "the profile"


def profile(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    sample: object,
    mesh: Mesh | None = None,
    *,
    further: Sequence[object] = (),
    loss: Loss | None = None,
) -> Profile:
    """Measure a model's training step: how long its modules take, what memory they need, which rows its tables look up.

    Plans and forecasts are made from that. A copy of model and optimizer takes real steps for some seconds; the model,
    its optimizer, gradients, buffers and random states stay as they are.

    On a mesh every rank must call it, with samples of its own: computation is timed while all ranks compute, lookups of
    all ranks are recorded, and the network is measured. On one process alone the profile has a nominal network.

    Args:
        model: Not distributed yet, on its device; or built within `tulle.deferred_init`: if it does not fit into
            memory, its modules are run one at a time.
        optimizer: Over its parameters, or several.
        sample: One rank's batch (a micro-batch, of a pipeline), as the model is called with it: a mapping is passed as
            keywords, a tuple as positional arguments, anything else as the one argument.
        mesh: From `tulle.init`; None for this process alone.
        further: More samples, from which it is seen what tables look up from step to step.
        loss: A function from what the model returns to the loss. None takes its attribute `loss`, or else the sum of
            what it returns.

    Raises:
        ModelError: On every rank, if model, optimizer or loss are not what they should be; if no parameter is trained,
            or the optimizer steps only with a closure (LBFGS); if the model does not run on the samples, has a
            ScriptModule, or, when it runs, replaces modules of its own or sends to other ranks.
        MeshError: If `mesh` is no `Mesh`.

    Example:
        >>> import torch, tulle
        >>> model = torch.nn.Sequential(torch.nn.EmbeddingBag(100, 8, sparse=True), torch.nn.Linear(8, 1))
        >>> found = tulle.profile(model, torch.optim.SGD(model.parameters()), torch.tensor([[1, 2, 2]]))
        >>> [module.name for module in found.modules], found.tables[0].stream, found.tables[0].tokens
        (['0', '1'], ((tensor([1, 2]),),), 3.0)
    """
    check_arguments(model, optimizer, mesh, loss, further)
    refuse_scripted(model)  # alike on all ranks
    refuse_lazy(model)
    keep_memory()  # as it will be in training
    axis = _alone() if mesh is None else _everyone(mesh)
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else [*optimizer]
    together(partial(check_trains, model, optimizers), model, sample, axis)
    samples = [sample, *further]
    check_as_many(samples, axis)
    measure = _in_steps if _fits(model, axis) else _without_memory
    random_state = State.now()
    try:
        with untouched(model):  # which a copy reaches if a forward was set on it that holds the first one's
            found, twin = measure(model, optimizers, samples, axis, loss or default_loss, _splitting(mesh))
            cluster = measure_cluster(axis, twin)
            shared = crowding(twin, axis) if twin else ()
            del twin
        cluster = replace(cluster, machine=replace(with_run_time(cluster.machine, axis), crowding=shared))
    finally:
        random_state.restore()
        gc.collect()
    networks = {} if mesh is None else {one.name: probe(one) for one in mesh.axes if one.size > 1}
    return replace(found, cluster=cluster, networks=networks)


def _fits(model: nn.Module, axis: Axis) -> bool:
    """Whether a model that has no memory yet can be trained whole on each rank. Every rank must call it."""
    lacking_bytes = sum(parameter.nbytes for parameter in model.parameters() if is_deferred(parameter))
    fits = COPIES * lacking_bytes <= memory_bytes(axis) * _SHARE_OF_MEMORY
    return all(gather_values(fits, axis, label=_LABEL))  # hosts may have unlike memories


def _splitting(mesh: Mesh | None) -> int:
    """Ranks along axis `model`, which splits layers."""
    return 1 if mesh is None else mesh.shape.get("model", 1)


def _alone() -> Axis:
    nobody = cast("dist.ProcessGroup", None)  # one rank sends nothing
    return Axis("alone", 0, 1, (0,), nobody, torch.device("cpu"), 0.0)


def _everyone(mesh: Mesh) -> Axis:
    """All ranks of a mesh as one axis."""
    for axis in mesh.axes:
        if axis.size == mesh.size:
            return axis
    world = axis_of(name="everyone")
    mine = mesh.axes[0]
    host = mine.hosts[mine.rank] if mine.hosts else mesh.rank
    return replace(world, device=mesh.device, hosts=tuple(gather_values(host, world, label=_LABEL)))


def _in_steps(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    samples: Sequence[object],
    axis: Axis,
    loss: Loss,
    splitting: int,
) -> tuple[Profile, Twin]:
    """A copy of the whole model takes real steps."""
    prepared = together(
        lambda: _prepare(model, optimizers, samples, loss, is_first=axis.rank == 0), model, samples[0], axis
    )
    twin = prepared.twin
    pieces = gather_values(prepared.pieces, axis, label=_LABEL)[0]
    assert pieces is not None, "rank 0 has cut the model"
    counts = together(lambda: _count(twin, pieces.names), model, samples[0], axis)
    times = timed(twin, pieces.names, axis)
    weights_s = timed_weights(twin, pieces.names, axis)
    fixed = fixed_share(twin, axis)
    optimizer = together(lambda: optimizer_profile(twin, times.update_s), model, samples[0], axis)
    owners = owners_of(model, pieces.names)
    tables = table_profiles(model, optimizers, prepared.looks, owners, axis)
    trained_bytes, frozen_bytes = bytes_of(model, owners, leave={table.name for table in tables})
    split_of = splits(model, pieces.names, counts.made_bytes, counts.taken_bytes, ranks=splitting)
    modules = tuple(
        ModuleProfile(
            name,
            forward_s=times.forward_s[number],
            backward_s=times.backward_s[number],
            flop=counts.flop[number],
            parameters_bytes=trained_bytes[name],
            activations_bytes=counts.activations_bytes[number],
            reads=pieces.reads[number],
            split=split_of.get(name),
            around=pieces.around[name],
            frozen_bytes=frozen_bytes[name],
            weights_s=weights_s[number],
        )
        for number, name in enumerate(pieces.names)
    )
    found = Profile(
        model=type(model).__name__,
        batch=samples_in(samples[0]),
        modules=modules,
        tables=tables,
        optimizer=optimizer,
        cluster=NOWHERE,
        step_s=times.step_s,
        peak_bytes=counts.peak_bytes,
        fixed_share=fixed or 0.0,
        is_divisible=fixed is not None,
        between=pieces.between,
    )
    return found, twin


@dataclass(frozen=True, slots=True)
class _Prepared:
    """What a rank needs before steps are timed: the copy that takes them, what it looked up, on rank 0 its pieces."""

    twin: Twin
    looks: Sequence[Looks]
    pieces: Pieces | None


def _prepare(
    model: nn.Module, optimizers: Sequence[Optimizer], samples: Sequence[object], loss: Loss, *, is_first: bool
) -> _Prepared:
    twin = Twin.of(model, optimizers, samples, loss, borrows=True)
    seen = looks(twin)
    with refuse_sending(model):
        twin.step(samples[0])
    refuse_replaced(kinds_of(model), twin.model)
    return _Prepared(twin, seen, cut(twin, replace(_alone(), device=twin.device)) if is_first else None)


def _count(twin: Twin, names: Sequence[str]) -> Counts:
    def rest(loss: Tensor) -> None:
        loss.backward()
        twin.update()

    return count(twin.model, names, lambda: twin.forward(twin.samples[0]), rest, twin.held())


def _without_memory(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    samples: Sequence[object],
    axis: Axis,
    loss: Loss,
    splitting: int,
) -> tuple[Profile, None]:
    """Each module alone, lent some memory while it runs; what is computed between modules is not seen."""
    del loss, splitting  # of no module
    measured = together(lambda: profile_pieces(model, samples[0], axis, STAGES), model, samples[0], axis)
    timed_pieces, calls = gather_values(measured, axis, label=_LABEL)[0]
    pieces = Pieces.of(timed_pieces, calls)
    owners = owners_of(model, pieces.names)
    tables = table_profiles(model, optimizers, [{} for _ in samples], owners, axis)
    trained_bytes, frozen_bytes = bytes_of(model, owners, leave={table.name for table in tables})
    modules = tuple(
        ModuleProfile(
            piece.name,
            forward_s=(1 - _BACKWARD_SHARE) * piece.time_s,
            backward_s=_BACKWARD_SHARE * piece.time_s,
            parameters_bytes=trained_bytes[piece.name],
            activations_bytes=piece.activation_bytes,
            reads=reads,
            around=pieces.around[piece.name],
            frozen_bytes=frozen_bytes[piece.name],
        )
        for piece, reads in zip(timed_pieces, pieces.reads, strict=True)
    )
    optimizer = together(lambda: tried(optimizers, axis.device), model, samples[0], axis)
    parameters_bytes = sum(parameter.nbytes for parameter in model.parameters())
    step_s = sum(piece.time_s for piece in timed_pieces) + optimizer.step_s_per_byte * parameters_bytes
    found = Profile(
        model=type(model).__name__,
        batch=samples_in(samples[0]),
        modules=modules,
        tables=tables,
        optimizer=optimizer,
        cluster=NOWHERE,
        step_s=step_s,
        between=pieces.between,
    )
    return found, None
