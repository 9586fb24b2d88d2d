"""`footprints`: the bytes that each rank of axis `pipe` needs under a plan, from what one process needed.

    peak = parameters + optimizer state + max(activations, gradients) + what comes and goes
    of micro-batches             .. + activations + gradients + ..

Activations give way to gradients during backward; but those of further micro-batches come beside the gradients that add
up over all of them. What comes and goes, kernels' own buffers say, is what the measured peak had beyond this sum.

Source: Rajbhandari et al., *ZeRO* (2020), section 3, for what is kept; Narayanan et al., *PipeDream-2BW* (ICML'21), for
how many micro-batches a stage of 1F1B holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tulle.cost import Network
from tulle.memory import Memory
from tulle.pipeline.schedule import activations_at_once, checked
from tulle.plan.exchange import Tariff
from tulle.plan.plan import MODEL, Plan
from tulle.plan.sharing import sharers
from tulle.plan.work import DATA, NARROW, Share, Work, bytes_of, is_parameter, share_of, work_of
from tulle.workload import Cluster, Profile, TableProfile


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes on one rank.

    Args:
        parameters_bytes: Parameters, masters included; of tables that are split this rank's part.
        gradients_bytes: Gradients.
        optimizer_bytes: The optimizer's state.
        activations_bytes: What forward leaves for backward, of all micro-batches that are held at a time.
        transient_bytes: What comes and goes.
        adds_up: Whether gradients add up over micro-batches, and stay while activations come and go.
    """

    parameters_bytes: int = 0
    gradients_bytes: int = 0
    optimizer_bytes: int = 0
    activations_bytes: int = 0
    transient_bytes: int = 0
    adds_up: bool = False

    @property
    def peak_bytes(self) -> int:
        """The most at any moment of a step."""
        return sum(self.parts_bytes().values())

    def parts_bytes(self) -> dict[str, int]:
        """What the most is made of, by name, the largest first."""
        changing = ("activations", self.activations_bytes), ("gradients", self.gradients_bytes)
        parts = dict([("parameters", self.parameters_bytes), ("optimizer state", self.optimizer_bytes)])
        parts |= dict(changing if self.adds_up else [max(changing, key=lambda one: one[1])])
        parts |= {"passing": self.transient_bytes}
        return dict(sorted(parts.items(), key=lambda one: -one[1]))

    def __add__(self, other: Footprint) -> Footprint:
        return Footprint(
            self.parameters_bytes + other.parameters_bytes,
            self.gradients_bytes + other.gradients_bytes,
            self.optimizer_bytes + other.optimizer_bytes,
            self.activations_bytes + other.activations_bytes,
            self.transient_bytes + other.transient_bytes,
            self.adds_up or other.adds_up,
        )


def footprints(
    plan: Plan, profile: Profile, cluster: Cluster, *, batch: int | None = None, tariff: Tariff | None = None
) -> list[Footprint]:
    """What each rank of axis `pipe` needs; all ranks of the other axes need as much.

    Args:
        plan: As for `lower`.
        profile: What one process needed.
        cluster: Where it runs.
        batch: As for `lower`.
        tariff: As for `lower`.
    """
    share = share_of(plan, profile, batch)
    works = work_of(plan, profile, share, share.network(MODEL, cluster, profile))
    network = share.network(DATA, cluster, profile)
    return footprints_of(plan, profile, share, works, tariff or Tariff(profile), network)


def footprints_of(
    plan: Plan, profile: Profile, share: Share, works: Sequence[Work], tariff: Tariff, network: Network
) -> list[Footprint]:
    """The same, of pieces that are dealt already, on such a network of axis `data`."""
    state_share = profile.optimizer.state_share
    passing_bytes = _transient_bytes(profile, share, tariff)
    found = [
        Footprint(
            transient_bytes=passing_bytes + _beside_sums(plan, share, works, rank), adds_up=share.micro_batches > 1
        )
        for rank in range(share.pipe)
    ]
    held = [_held(plan, share, works, rank) for rank in range(share.pipe)]
    ranks = sharers(plan.memory, network, share.data)
    largest_bytes = max((2 * work.parameters_bytes + work.frozen_bytes for work in works), default=0)
    for work in works:
        rank = work.stage % share.pipe
        found[rank] += dense(work.parameters_bytes, plan.memory, ranks, state_share)
        found[rank] += Footprint(work.frozen_bytes // (ranks if plan.memory.full_shard else 1))
        found[rank] += Footprint(activations_bytes=round(held[rank] * work.activations_bytes))
    if plan.memory.full_shard and share.data > 1:  # one piece is whole at a time, and its gradient
        found = [one + Footprint(transient_bytes=largest_bytes) for one in found]
    stage_of = {work.name: work.stage for work in works}
    for table in profile.tables:
        if not is_parameter(table, plan):
            rank = stage_of.get(table.module, 0) % share.pipe
            found[rank] += _table(table, share, tariff, state_share, is_split=table.name in plan.placements)
    return found


def dense(parameters_bytes: int, memory: Memory, ranks: int, state_share: float) -> Footprint:
    """What parameters with dense gradients need, as they are shared out over axis `data`."""
    whole_bytes = round(parameters_bytes / (NARROW if memory.precision else 1))
    if memory.full_shard:
        part = whole_bytes // ranks
        return Footprint(part, part, round(state_share * part))
    stepped_bytes = whole_bytes // ranks if memory.shard_optimizer else whole_bytes
    masters_bytes = stepped_bytes if memory.precision else 0
    return Footprint(parameters_bytes + masters_bytes, parameters_bytes, round(state_share * stepped_bytes))


def _beside_sums(plan: Plan, share: Share, works: Sequence[Work], rank: int) -> int:
    """Bytes beside gradients that add up: those of one piece for one micro-batch, and over axis `data` what travels."""
    if share.micro_batches == 1 or plan.memory.full_shard:
        return 0
    sizes = [work.parameters_bytes for work in works if work.stage % share.pipe == rank]
    return max(sizes, default=0) + (sum(sizes) if share.data > 1 else 0)


def _table(table: TableProfile, share: Share, tariff: Tariff, state_share: float, *, is_split: bool) -> Footprint:
    """What a table needs; its gradient has the rows that were touched, or all."""
    owners = share.data if is_split else 1
    kept_bytes = bytes_of(table) // owners
    rows_bytes = tariff.updated_bytes(table.name, share.data, share.batches) / owners if table.is_sparse else kept_bytes
    return Footprint(kept_bytes, round(rows_bytes), round(state_share * kept_bytes))


def _held(plan: Plan, share: Share, works: Sequence[Work], rank: int) -> float:
    """Micro-batches of which a rank has activations at a time, of all of its stages together."""
    if share.pipe == 1:
        return 1.0
    stages = max(work.stage for work in works) + 1
    return activations_at_once(checked(plan.pipeline_schedule), rank, share.pipe, stages, share.micro_batches)


def _transient_bytes(profile: Profile, share: Share, tariff: Tariff) -> int:
    """What the measured peak had beyond what is counted, in proportion to a micro-batch and a rank's part."""
    trained_bytes = sum(piece.parameters_bytes for piece in profile.modules)
    frozen_bytes = sum(piece.frozen_bytes for piece in profile.modules)
    activations_bytes = sum(piece.activations_bytes for piece in profile.modules)
    state_share = profile.optimizer.state_share
    counted = dense(trained_bytes, Memory(), 1, state_share)
    counted += Footprint(parameters_bytes=frozen_bytes, activations_bytes=activations_bytes)
    alone = Share({DATA: 1}, batches=1.0)
    for table in profile.tables:
        counted += _table(table, alone, tariff, state_share, is_split=False)
    return round(max(0, profile.peak_bytes - counted.peak_bytes) * share.scale / share.pipe / share.model)
