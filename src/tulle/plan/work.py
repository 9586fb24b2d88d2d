"""`work_of`: what one rank computes, holds and sends for each piece of a model under a plan, from what one process did.

A micro-batch of another size takes and keeps in proportion; a module split over n ranks of axis `model` is divided as
far as its `Split` says, and pays what that exchanges; one that recomputes runs its forward again before its backward.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from tulle.cost import NOTHING, Cost, Network, all_gather_cost, all_reduce_cost
from tulle.errors import PlanError
from tulle.plan.plan import DATA, MODEL, PIPE, Plan
from tulle.sync import DENSIFY
from tulle.workload import Cluster, ModuleProfile, Profile, Split, TableProfile

NARROW = 0.5
"""Bytes of a parameter in 16 bits by one in 32."""
AXES = (PIPE, DATA, MODEL)
"""The axes that a plan speaks of, in the order in which ranks are arranged: those that send most lie together."""


@dataclass(frozen=True, slots=True)
class Share:
    """How many ranks share a step, and how many micro-batches each works on.

    Args:
        mesh: Size of each axis by name, the slowest-varying first.
        batches: Measured micro-batches that one replica works on in a step; need not be whole.
        micro_batches: Into how many it cuts them.

    Example:
        >>> share = Share({"pipe": 2, "data": 4, "model": 2}, batches=4.0, micro_batches=8)
        >>> share.scale, share.ranks, share.stride("data")
        (0.5, 16, 2)
    """

    mesh: Mapping[str, int]
    batches: float
    micro_batches: int = 1

    @property
    def data(self) -> int:
        """Ranks along axis `data`."""
        return self.mesh.get(DATA, 1)

    @property
    def pipe(self) -> int:
        """Ranks along axis `pipe`."""
        return self.mesh.get(PIPE, 1)

    @property
    def model(self) -> int:
        """Ranks along axis `model`."""
        return self.mesh.get(MODEL, 1)

    @property
    def scale(self) -> float:
        """How many times the measured micro-batch one of these is."""
        return self.batches / self.micro_batches

    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        return math.prod(self.mesh.values())

    def stride(self, axis: str) -> int:
        """How far apart in the numbering the neighbours along an axis are."""
        names = list(self.mesh)
        return math.prod(self.mesh[name] for name in names[names.index(axis) + 1 :]) if axis in self.mesh else 1

    def network(self, axis: str, cluster: Cluster, profile: Profile) -> Network:
        """What an axis gives while all its groups use it alike; as measured, where it was on this cluster."""
        size = self.mesh.get(axis, 1)
        is_measured = cluster == profile.cluster and axis in profile.networks and self.ranks == cluster.ranks
        if is_measured and size == cluster.ranks:
            return profile.networks[axis]
        return cluster.network(size, stride=self.stride(axis))


@dataclass(frozen=True, slots=True)
class Work:
    """What one rank does for one piece of the model, for one micro-batch.

    Args:
        name: The piece's.
        number: Its place in the order in which pieces run.
        stage: Where it lives.
        forward_s: Seconds of forward, without what is waited for.
        backward_s: Of backward, with the forward that runs again.
        parameters_bytes: That this rank has of its dense parameters, tables with dense gradients included, before they
            are shared out over axis `data`.
        activations_bytes: What it keeps of one micro-batch until backward.
        all_reduced: What the sums over axis `model`, and what is gathered there, cost in forward.
        all_reduced_again: The same in backward.
        reads: Bytes that it reads of what other pieces made, by their name.
        frozen_bytes: That this rank has of its parameters that are not trained, before they are shared out.
        weights_s: Of backward, what can be put off.
    """

    name: str
    number: int
    stage: int
    forward_s: float
    backward_s: float
    parameters_bytes: int
    activations_bytes: int
    all_reduced: Cost
    all_reduced_again: Cost
    reads: Mapping[str, int]
    frozen_bytes: int
    weights_s: float = 0.0


def share_of(plan: Plan, profile: Profile, batch: int | None = None) -> Share:
    """How a plan deals a step to ranks.

    Args:
        plan: The plan.
        profile: Of the model.
        batch: Samples of a step, of all replicas; None for as many a rank as the plan was made for, or were measured.

    Raises:
        PlanError: If the mesh has an axis that no plan speaks of.
    """
    unknown = [name for name, size in plan.mesh.items() if name not in AXES and size > 1]
    if unknown:
        raise PlanError(f"the plan's mesh has an axis {unknown[0]!r}, a forecast knows {', '.join(AXES)}")
    share = Share(dict(plan.mesh), 0.0, plan.micro_batches)
    samples = samples_a_rank(plan, profile) * share.ranks if batch is None else batch
    return replace(share, batches=samples / profile.batch / share.data)


def samples_a_rank(plan: Plan, profile: Profile) -> float:
    """Of a step, as the plan was made for, or else were measured."""
    told = plan.prediction
    return told.batch / told.ranks if told else profile.batch


def stages_of(plan: Plan, profile: Profile) -> list[int]:
    """The stage of each piece: its own, or that of the nearest module around it.

    Raises:
        PlanError: If the plan cuts the model into stages and says nothing of a piece.
    """
    if plan.mesh.get(PIPE, 1) == 1:
        return [0] * len(profile.modules)
    found: list[int] = []
    for piece in profile.modules:
        stage = stage_around(plan.stages, piece.name)
        if stage is None:
            raise PlanError(
                f"the plan has {plan.mesh[PIPE]} ranks along {PIPE!r} but no stage for {piece.name!r}: a forecast "
                "needs Plan.stages for each piece of the profile; tulle.plan.best_plan names them"
            )
        found.append(stage)
    return found


def work_of(plan: Plan, profile: Profile, share: Share, network: Network) -> list[Work]:
    """What one rank does for each piece of its stage, for one micro-batch, in the order in which they run.

    Args:
        plan: What is split, recomputed, and where each piece lives.
        profile: What one process did.
        share: How the step is dealt.
        network: Of axis `model`.
    """
    split, stages, whole_bytes = split_modules(plan, profile), stages_of(plan, profile), dense_tables(plan, profile)
    narrow = NARROW if plan.memory.precision else 1.0
    works: list[Work] = []
    for number, piece in enumerate(profile.modules):
        along = network if piece.name in split else None
        work = _work(piece, (number, stages[number]), share, along, profile)
        parameters_bytes = math.ceil(narrow * (work.parameters_bytes + whole_bytes.get(piece.name, 0)))
        frozen_bytes = math.ceil(narrow * work.frozen_bytes)
        work = replace(work, parameters_bytes=parameters_bytes, frozen_bytes=frozen_bytes)
        is_recomputed = any(is_within(piece.name, name) for name in plan.memory.recompute)
        is_offloaded = any(is_within(piece.name, name) for name in plan.memory.offload)
        if is_recomputed or is_offloaded or plan.memory.full_shard:
            work = replace(work, weights_s=0.0)
        works.append(_recomputed(work) if is_recomputed else work)
    return works


def dense_tables(plan: Plan, profile: Profile) -> dict[str, int]:
    """Bytes of the tables that are parameters like others, by the piece that looks them up."""
    found: dict[str, int] = {}
    for table in profile.tables:
        if is_parameter(table, plan):
            found[table.module] = found.get(table.module, 0) + bytes_of(table)
    return found


def is_parameter(table: TableProfile, plan: Plan) -> bool:
    """Whether a table is a parameter like others: its gradient is dense, and is neither split nor sent by rows."""
    return not table.is_sparse and plan.schemes.get(table.name, DENSIFY) == DENSIFY


def bytes_of(table: TableProfile) -> int:
    """Bytes of the whole table."""
    return table.rows * table.width * table.value_bytes


def total_s(work: Work) -> float:
    """Forward and backward of a piece, with what it waits for."""
    return work.forward_s + work.backward_s + work.all_reduced.seconds + work.all_reduced_again.seconds


def split_modules(plan: Plan, profile: Profile) -> set[str]:
    """Names of the pieces that axis `model` splits."""
    if plan.mesh.get(MODEL, 1) == 1:
        return set()
    named = dict.fromkeys(plan.tensor_parallel, 0)
    return {
        piece.name
        for piece in profile.modules
        if piece.split and (not named or stage_around(named, piece.name) is not None)
    }


def is_within(name: str, module: str) -> bool:
    """Whether a module is another one, or lies within it.

    Example:
        >>> is_within("encoder.0.attention", "encoder.0"), is_within("encoder.01", "encoder.0")
        (True, False)
    """
    return not module or name == module or name.startswith(f"{module}.")


def _work(
    piece: ModuleProfile, place: tuple[int, int], share: Share, network: Network | None, profile: Profile
) -> Work:
    scale, part, summed, summed_again = share.scale, 1.0, NOTHING, NOTHING
    if network is not None and piece.split is not None:
        part = 1 - piece.split.share + piece.split.share / share.model
        summed, summed_again = _along_model(piece.split, scale, network, share.model)
    read_bytes, written_bytes = piece.parameters_bytes + piece.frozen_bytes, piece.parameters_bytes
    rate = profile.cluster.machine.memory_bytes_per_s
    forward_fixed_s = max(read_bytes / rate, profile.fixed_share * piece.forward_s)
    backward_fixed_s = max((read_bytes + written_bytes) / rate, profile.fixed_share * piece.backward_s)
    backward_s = _scaled(piece.backward_s, backward_fixed_s, scale) * part
    return Work(
        piece.name,
        *place,
        forward_s=_scaled(piece.forward_s, forward_fixed_s, scale) * part,
        backward_s=backward_s,
        parameters_bytes=math.ceil(piece.parameters_bytes * part),
        activations_bytes=math.ceil(piece.activations_bytes * scale * part),
        all_reduced=summed,
        all_reduced_again=summed_again,
        reads={name: math.ceil(size * scale) for name, size in piece.reads.items()},
        frozen_bytes=math.ceil(piece.frozen_bytes * part),
        weights_s=backward_s * min(1.0, piece.weights_s / piece.backward_s) if piece.backward_s else 0.0,
    )


def _along_model(split: Split, scale: float, network: Network, ranks: int) -> tuple[Cost, Cost]:
    """What a split module exchanges over axis `model` for a micro-batch, forward and backward."""
    again_bytes = split.all_reduced_bytes if split.all_reduced_again_bytes is None else split.all_reduced_again_bytes
    summed, summed_again = (
        all_reduce_cost(size * scale, network, ranks) if size else NOTHING
        for size in (split.all_reduced_bytes, again_bytes)
    )
    if split.gathered_bytes:
        summed += all_gather_cost([split.gathered_bytes * scale / ranks] * ranks, network)
    return summed, summed_again


def _scaled(seconds: float, fixed_s: float, scale: float) -> float:
    """Seconds of a micro-batch of another size, of which some are the same for any.

    Operations are begun, and parameters are read and their gradients written, once for each.

    Source: Williams et al., *Roofline* (CACM 2009): a small batch is bound by what it reads.
    """
    fixed_s = min(seconds, fixed_s)
    return fixed_s + (seconds - fixed_s) * scale


def _recomputed(work: Work) -> Work:
    """The same if only what it reads is kept, and forward runs again."""
    return replace(
        work,
        backward_s=work.backward_s + work.forward_s,
        activations_bytes=min(work.activations_bytes, sum(work.reads.values())),
        all_reduced_again=work.all_reduced_again + work.all_reduced,
    )


def stage_around(by_module: Mapping[str, int], name: str) -> int | None:
    """What is said of a module, or of the nearest one around it; None if nothing is."""
    while name not in by_module:
        if not name:
            return None
        name = name.rpartition(".")[0]
    return by_module[name]
