"""`profile`: measures what a model's training step does, on one process or on all ranks of a mesh at once.

A copy of the model and of its optimizer takes real steps, some with a watch at the ends of its modules, so that what
pieces take adds up to the step. On a mesh all ranks take their steps at once, each on its own samples, and the slowest
rank of each step counts: a step with synchronization waits for it.
"""

from __future__ import annotations

import gc
import logging
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
from tulle.pipeline import Piece
from tulle.pipeline.calls import Calls, around, pieces_of, watch
from tulle.pipeline.homes import outward
from tulle.pipeline.partition import COPIES
from tulle.pipeline.profile import PIECES_PER_STAGE, as_call
from tulle.pipeline.profile import profile as profile_pieces
from tulle.pipeline.randomness import State
from tulle.pipeline.unfit import kinds_of, refuse_replaced, refuse_scripted, refuse_sending
from tulle.pipeline.untouched import untouched
from tulle.profiling.calls import with_run_time
from tulle.profiling.counts import Counts, count
from tulle.profiling.crowding import crowding
from tulle.profiling.machine import NOMINAL, measure_cluster, memory_bytes
from tulle.profiling.optimizer import optimizer_profile, tried
from tulle.profiling.refusals import check_arguments, check_trains, together
from tulle.profiling.samples import samples_in
from tulle.profiling.splits import splits
from tulle.profiling.steps import Loss, Twin
from tulle.profiling.table_profiles import Looks, looks, table_profiles
from tulle.profiling.timing import fixed_share, timed
from tulle.profiling.weights import timed_weights
from tulle.workload import Cluster, Machine, ModuleProfile, Profile

STAGES = 8
"""Pieces are small enough for so many stages of a pipeline."""
_SHARE_OF_MEMORY = 0.5
_BACKWARD_SHARE = 2 / 3
"""Of forward and backward together, where only their sum is known: a matrix product has two in backward."""
NOWHERE = Cluster(1, 1, Machine(1.0, 1.0), NOMINAL)
_LABEL = "the profile"
logger = logging.getLogger("tulle")


def profile(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    sample: object,
    mesh: Mesh | None = None,
    *,
    further: Sequence[object] = (),
    loss: Loss | None = None,
) -> Profile:
    """Measure what a model's training step does: the ground of plans and forecasts.

    On a mesh every rank must call it, with samples of its own: tables are then seen by as many ranks, computation is
    timed while all ranks compute, and the network is measured. Without one, nothing is sent, and the network is a
    nominal one. The model, its optimizer, gradients, buffers and random states stay as they are.

    Args:
        model: Not distributed yet, on its device; or built within `tulle.deferred_init`: if it does not fit, its
            modules are lent memory one at a time.
        optimizer: Over its parameters, or several.
        sample: One rank's batch (a micro-batch, of a pipeline), as the model is called with it: a mapping is passed as
            keywords, a tuple as positional arguments, anything else as the one argument.
        mesh: From `tulle.init`; None for this process alone.
        further: More samples, for what tables look up in further steps.
        loss: From the model's result to the loss; None for its `loss`, or else the sum of what it gives.

    Raises:
        ModelError: On every rank, if model, optimizer or loss is none, nothing is trained, the optimizer steps by a
            closure alone (LBFGS), the model does not run on the samples, has a ScriptModule, puts other modules in
            place of its own when it runs, or sends to other ranks then.
        MeshError: If the mesh is none.

    Example:
        >>> import torch, tulle
        >>> model = torch.nn.Sequential(torch.nn.EmbeddingBag(100, 8, sparse=True), torch.nn.Linear(8, 1))
        >>> found = tulle.profile(model, torch.optim.SGD(model.parameters()), torch.tensor([[1, 2, 2]]))
        >>> [module.name for module in found.modules], found.tables[0].stream, found.tables[0].tokens
        (['0', '1'], ((tensor([1, 2]),),), 3.0)
    """
    check_arguments(model, optimizer, mesh, loss, further)
    refuse_scripted(model)  # alike on all ranks
    keep_memory()  # as it will be in training
    axis = _alone() if mesh is None else _everyone(mesh)
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else [*optimizer]
    together(partial(check_trains, model, optimizers), model, sample, axis)
    samples = [sample, *further]
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
    return replace(found, model=type(model).__name__, batch=samples_in(sample), cluster=cluster, networks=networks)


def _fits(model: nn.Module, axis: Axis) -> bool:
    """Whether a model that has no memory yet can be trained whole on each rank."""
    lacking_bytes = sum(parameter.nbytes for parameter in model.parameters() if is_deferred(parameter))
    return COPIES * lacking_bytes <= memory_bytes(axis) * _SHARE_OF_MEMORY


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


@dataclass(frozen=True, slots=True)
class _Pieces:
    """Modules that stay whole, in the order in which they run.

    Args:
        names: Of them.
        reads: What each reads of the others.
        around: Who calls each.
        between: How many operations modules have that call them, by name.
    """

    names: Sequence[str]
    reads: Sequence[Mapping[str, int]]
    around: Mapping[str, tuple[str, ...]]
    between: Mapping[str, int]

    @staticmethod
    def of(pieces: Sequence[Piece], calls: Calls) -> _Pieces:
        names = [piece.name for piece in pieces]
        reads = [{names[at]: size for at, size in (piece.incoming or {}).items()} for piece in pieces]
        return _Pieces(names, reads, _around(names, calls), _between(names, calls))


def _around(names: Sequence[str], calls: Calls) -> dict[str, tuple[str, ...]]:
    """Of each piece the modules that could be placed in its stead; none that calls what by its name is elsewhere."""
    callers = around(names, calls)
    elsewhere = {one for name in names for one in callers[name] if one and not name.startswith(f"{one}.")}
    return {name: tuple(one for one in callers[name] if one not in elsewhere) for name in names}


def _between(names: Sequence[str], calls: Calls) -> dict[str, int]:
    """Operations that run between pieces, by the module of whose forward they are."""
    pieces = set(names)
    return {name: count for name, count in calls.operations.items() if pieces.isdisjoint(outward(name))}


@dataclass(slots=True)
class _Prepared:
    """What a rank needs before steps are timed."""

    twin: Twin
    looks: Sequence[Looks]
    pieces: _Pieces | None
    counts: Counts = field(default_factory=lambda: Counts([], []))


def _in_steps(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    samples: Sequence[object],
    axis: Axis,
    loss: Loss,
    splitting: int,
) -> tuple[Profile, Twin]:
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
    owners = _owners(model, pieces.names)
    tables = table_profiles(model, optimizers, prepared.looks, owners, axis)
    dense_bytes, frozen_bytes = _bytes_of_pieces(model, owners, {table.name for table in tables})
    found = splits(model, pieces.names, counts.made_bytes, ranks=splitting)
    modules = tuple(
        ModuleProfile(
            name,
            times.forward_s[number],
            times.backward_s[number],
            counts.flop[number],
            dense_bytes[name],
            counts.activations_bytes[number],
            pieces.reads[number],
            found.get(name),
            pieces.around[name],
            frozen_bytes[name],
            weights_s[number],
        )
        for number, name in enumerate(pieces.names)
    )
    found = Profile(
        "",
        0,
        modules,
        tables,
        optimizer,
        NOWHERE,
        times.step_s,
        counts.peak_bytes,
        fixed_share=fixed or 0.0,
        is_divisible=fixed is not None,
        between=pieces.between,
    )
    return found, twin


def _prepare(
    model: nn.Module, optimizers: Sequence[Optimizer], samples: Sequence[object], loss: Loss, *, is_first: bool
) -> _Prepared:
    twin = Twin.of(model, optimizers, samples, loss, borrows=True)
    seen = looks(twin)
    with refuse_sending(model):
        twin.step(samples[0])
    refuse_replaced(kinds_of(model), twin.model)
    return _Prepared(twin, seen, _cut(twin) if is_first else None)


def _cut(twin: Twin) -> _Pieces:
    """Cut a model into pieces, and see what each reads of the others, if the pipeline can tell."""
    axis = replace(_alone(), device=twin.device)
    try:
        return _Pieces.of(*profile_pieces(twin.model, twin.samples[0], axis, STAGES))
    except Exception as problem:  # whatever a model does with a placeholder
        logger.info("what pieces read of each other is not known: %s", str(problem).split("\n", 1)[0])
    args, kwargs = as_call(twin.samples[0], twin.device)
    calls = watch(twin.model, args, kwargs)
    largest = (calls.time_s.get("") or sum(calls.time_s.values())) / (STAGES * PIECES_PER_STAGE)
    names = pieces_of(twin.model, calls, calls.time_s, largest)
    return _Pieces(names, [{} for _ in names], _around(names, calls), _between(names, calls))


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
    pieces, calls = gather_values(measured, axis, label=_LABEL)[0]
    cut = _Pieces.of(pieces, calls)
    owners = _owners(model, cut.names)
    tables = table_profiles(model, optimizers, [{} for _ in samples], owners, axis)
    dense_bytes, frozen_bytes = _bytes_of_pieces(model, owners, {table.name for table in tables})
    modules = tuple(
        ModuleProfile(
            piece.name,
            (1 - _BACKWARD_SHARE) * piece.time_s,
            _BACKWARD_SHARE * piece.time_s,
            parameters_bytes=dense_bytes[piece.name],
            activations_bytes=piece.activation_bytes,
            reads=reads,
            around=cut.around[piece.name],
            frozen_bytes=frozen_bytes[piece.name],
        )
        for piece, reads in zip(pieces, cut.reads, strict=True)
    )
    optimizer = together(lambda: tried(optimizers), model, samples[0], axis)
    parameters_bytes = sum(parameter.nbytes for parameter in model.parameters())
    step_s = sum(piece.time_s for piece in pieces) + optimizer.step_s_per_byte * parameters_bytes
    return Profile("", 0, modules, tables, optimizer, NOWHERE, step_s, between=cut.between), None


def _owners(model: nn.Module, names: Sequence[str]) -> dict[str, str]:
    """The piece that each parameter belongs to: that which it is in, or else the first within the module it is of."""
    first: dict[str, str] = {}
    for piece in names:
        for outer in outward(piece):
            first.setdefault(outer, piece)
    return {
        name: next(first[outer] for outer in outward(name) if outer in first) for name, _ in model.named_parameters()
    }


def _bytes_of_pieces(
    model: nn.Module, owners: Mapping[str, str], tables: Collection[str]
) -> tuple[Counter[str], Counter[str]]:
    """Bytes of each piece's parameters: of trained ones that are no tables, and of frozen ones; each counts once."""
    trained, frozen = Counter[str](), Counter[str]()
    for name, parameter in model.named_parameters():
        if name not in tables:
            (trained if parameter.requires_grad else frozen)[owners[name]] += parameter.nbytes
    return trained, frozen
