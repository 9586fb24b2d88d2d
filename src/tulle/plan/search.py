"""`best_plan`: the plan of least predicted seconds that fits in memory, by branch and bound over what can be chosen.

    mesh, memory, micro-batches     all of them, the least lower bound first, until no bound is below the best
      cut into stages               all if they are few, else that of the fastest slowest stage (dynamic programming)
        layers to split             all subsets if they are few, else all and those that gain
          each table                all placements, and the schemes that are not worse throughout
            recomputation           the fewest modules that fit, if none do not
              buckets, schedule     all

What is left out is bounded, so the plan says whether it is the best there is, or how much better one could be.

Source: Land and Doig, *An automatic method of solving discrete programming problems* (1960); for the space, Jia et al.,
*FlexFlow* (MLSys'19) and Zheng et al., *Alpa* (OSDI'22), who search parts of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

from tulle.errors import PlanError
from tulle.memory import Memory
from tulle.pipeline.calls import placed_as_one
from tulle.pipeline.schedule import checked, is_split
from tulle.plan.bound import Bound
from tulle.plan.choices import Tables, splits
from tulle.plan.crowding import Crowding
from tulle.plan.cutting import fast_cuts
from tulle.plan.deal import Deal
from tulle.plan.exchange import Tariff
from tulle.plan.explanation import MemoryLackedError, binding, differences, links_of, parts_of
from tulle.plan.footprint import footprints_of
from tulle.plan.found import Found, decided, handicap
from tulle.plan.lateness import WORTH_S, put_off_s
from tulle.plan.limit import least_seconds
from tulle.plan.lower import lowered
from tulle.plan.moving import on_machine
from tulle.plan.plan import AT_READ, AT_STEP, MODEL, PIPE, Plan
from tulle.plan.prediction import Prediction, ms
from tulle.plan.saving import with_recomputed
from tulle.plan.space import MOST_CUTS, Space, cuts
from tulle.plan.work import DATA, Share, dense_tables, share_of, total_s, work_of
from tulle.simulate import run
from tulle.workload import Cluster, Profile

MOST_WORK = 60_000
"""After so many tasks and pieces, some seconds, the search ends with the best so far, on all ranks alike."""
WORTH_OFFERING = 0.01
"""Of a step that must be gained for another way to write the loop to be offered."""
STEP_WORK = 40
"""What lowering and simulating a step takes besides its tasks."""


def best_plan(
    profile: Profile,
    cluster: Cluster,
    *,
    memory_bytes: int | None = None,
    batch: int | None = None,
    space: Space | None = None,
    lookahead: bool | None = None,
    tariff: Tariff | None = None,
) -> Plan:
    """The plan of least predicted seconds for a model on a cluster. Pure: ranks that know the same choose the same.

    Args:
        profile: What the model does.
        cluster: What it runs on.
        memory_bytes: What a rank may use; None for what the cluster's machines have.
        batch: Samples of a step, of all replicas; None for as many a rank as were measured.
        space: What may be chosen; None for everything that `tulle.distribute` can put on.
        lookahead: Whether the loop goes through `tulle.lookahead`; None for what the profile saw.
        tariff: What is known of the tables' gradients from another search for the same profile.

    Returns:
        With `Plan.prediction`, which says how sure it is that there is none faster, and the runner-up.

    Raises:
        PlanError: If no plan fits in memory, naming the least that one needs; or the space names a table that the
            profile does not have.

    Example:
        >>> from tulle.cost import Network
        >>> from tulle.workload import *
        >>> cluster = Cluster(2, 1, Machine(1e12, 1e11), Network(1e-4, 1e9))
        >>> body = ModuleProfile("body", forward_s=1e-3, backward_s=2e-3, parameters_bytes=10**7)
        >>> profile = Profile("Net", 8, (body,), (), OptimizerProfile(2.0, 1e-10), cluster, step_s=5e-3)
        >>> plan = best_plan(profile, cluster)
        >>> dict(plan.mesh), plan.prediction.is_exact
        ({'data': 2}, True)
    """
    space = space or Space()
    space.check_tables(profile)
    limit_bytes = cluster.machine.memory_bytes if memory_bytes is None else memory_bytes
    samples = profile.batch * cluster.ranks if batch is None else batch
    moved = on_machine(profile, cluster.machine)
    moved = moved if lookahead is None else replace(moved, lookahead=lookahead)
    return Search(moved, cluster, samples, space, limit_bytes, tariff or Tariff(profile)).run()


@dataclass(slots=True)
class Search:
    """Branch and bound.

    Args:
        profile: What the model does.
        cluster: What it runs on.
        batch: Samples of a step, of all replicas.
        space: What may be chosen.
        memory_bytes: What a rank may use, None for any.
        tariff: What exchanges cost.
    """

    profile: Profile
    cluster: Cluster
    batch: int
    space: Space
    memory_bytes: int | None
    tariff: Tariff
    worked: int = field(init=False, default=0)
    """Tasks that were lowered, and pieces whose memory was weighed."""
    _bound: Bound = field(init=False)
    _around: dict[str, tuple[str, ...]] = field(init=False)
    _best: dict[object, Found] = field(init=False, default_factory=dict)
    """By what was decided, buckets apart."""
    _left_out_s: float = field(init=False, default=math.inf)
    """What no plan that was not looked at takes less than."""
    _least_bytes: float = field(init=False, default=math.inf)
    _least: Plan | None = field(init=False, default=None)
    """That which needs so little."""

    def __post_init__(self) -> None:
        puts_off = any(is_split(checked(schedule)) for schedule in self.space.pipeline_schedules)
        self._bound = Bound(self.profile, self.cluster, puts_off)
        self._around = {piece.name: piece.around for piece in self.profile.modules}

    def run(self) -> Plan:
        """The best plan, with its prediction."""
        meshes = self.space.meshes(self.cluster.ranks, self.profile)
        plain = [Plan(mesh) for mesh in meshes if set(mesh) == {DATA} and Memory() in self.space.memories]
        for frame in plain:  # what needs no stages is looked at in any case: other plans must be faster
            if self.batch >= frame.mesh[DATA]:
                self._branch(frame)
        for bound_s, plan in self._frames():
            if bound_s >= self.cutoff_s or self.is_spent:
                self._left_out_s = min(self._left_out_s, bound_s)
                break
            if plan not in plain:
                self._branch(plan)
        if self._least_bytes == math.inf and not self._best:
            raise PlanError(self.space.emptiness(self.cluster.ranks, self.profile, self.batch))
        if not self._best:
            raise MemoryLackedError(self._refusal())
        ordered = self.found()
        return self._told(ordered, min(self._left_out_s, ordered[0].score_s))

    def found(self) -> list[Found]:
        """The best of each kind of plan that was evaluated, the best first."""
        return sorted(self._best.values(), key=lambda found: found.score_s)

    @property
    def is_spent(self) -> bool:
        """Whether it has looked at as much as it may."""
        return self.worked + self.tariff.worked >= MOST_WORK

    @property
    def cutoff_s(self) -> float:
        """The runner-up: what is slower is neither."""
        scores = sorted(found.score_s for found in self._best.values())
        return scores[1] if len(scores) > 1 else math.inf

    def _frames(self) -> Iterator[tuple[float, Plan]]:
        """Meshes with ways of saving memory and micro-batches, each with its lower bound, the least first."""
        rough: list[tuple[float, int, Plan]] = []
        for mesh in self.space.meshes(self.cluster.ranks, self.profile):
            samples = self.batch / mesh[DATA]
            is_tight = self.memory_bytes is not None
            memories = self.space.memories_for(self.profile, mesh[DATA], is_tight=is_tight)
            for memory in memories if samples >= 1 else ():
                for micro_batches in self.space.micro_batches(self.profile, mesh, samples, is_tight=is_tight):
                    plan = Plan(mesh, memory=memory, micro_batches=micro_batches)
                    rough.append((self.least_s(plan, is_sharp=False), len(rough), plan))
        rough.sort()
        pending: list[tuple[float, int, Plan]] = []
        for least_s, number, plan in rough:  # sharper bounds only for those whose turn comes
            while pending and pending[0][0] <= least_s:
                yield pending[0][0], pending.pop(0)[2]
            pending.append((self.least_s(plan), number, plan))
            pending.sort()
        for least_s, _, plan in pending:
            yield least_s, plan

    def least_s(self, plan: Plan, *, is_sharp: bool = True) -> float:
        """What no plan on the same mesh, with the same micro-batches and way of saving memory, takes less than."""
        share = share_of(plan, self.profile, self.batch)
        return min(
            handicap(schedule, plan.memory) * self._bound.seconds(share, plan.memory, schedule, is_sharp=is_sharp)
            for schedule in self.space.schedules_for(plan.mesh, plan.memory)
        )

    def _branch(self, frame: Plan) -> None:
        share = share_of(frame, self.profile, self.batch)
        frame_s = self.least_s(frame)
        tables = Tables(self.profile, self.cluster, share, self.tariff, self.space.schemes)
        for least_s, dealt in self._dealt(frame, share):
            if least_s >= self.cutoff_s:
                break
            if self._is_hopeless(dealt):
                continue
            if not tables.is_complete(dealt):
                self._left_out_s = min(self._left_out_s, frame_s)
            deals: list[Deal] = []
            for planned in tables.all(dealt, is_whole=not self._may_split(frame)):
                deals.append(self._deal(planned, deals[0] if deals else None))
            for deal_s, deal in sorted(((self._least_of(deal), deal) for deal in deals), key=lambda one: one[0]):
                if self._best and self.is_spent:
                    self._left_out_s = min(self._left_out_s, frame_s)
                    return
                if deal_s < self.cutoff_s:
                    self._fit(deal, frame_s)

    def _is_hopeless(self, dealt: Plan) -> bool:
        """Whether a cut is too slow whatever happens to the tables: what that costs takes long to tell.

        Of tables with dense gradients it is not told: they are parameters if they are not split, and may be faster
        if they are.
        """
        is_bound = bool(self.profile.tables) and all(table.is_sparse for table in self.profile.tables)
        return is_bound and self._least_of(self._deal(dealt)) >= self.cutoff_s

    def _dealt(self, frame: Plan, share: Share) -> list[tuple[float, Plan]]:
        """Ways to cut and to split, each with the seconds that its slowest stage takes at least, the least first."""
        network = share.network(MODEL, self.cluster, self.profile)
        crowding = Crowding.of(self.cluster.machine, share.mesh)
        ease = crowding.least if crowding else 1.0
        found: list[tuple[float, Plan]] = []
        for cut, split in product(self._cuts(frame, share), splits(self.profile, self.cluster, share)):
            dealt = replace(cut, tensor_parallel=split)
            by_stage = [0.0] * share.pipe
            for work in work_of(dealt, self.profile, share, network):
                by_stage[work.stage] += share.micro_batches * total_s(work)
            found.append((ease * max(by_stage), dealt))
        return sorted(found, key=lambda one: one[0])

    def _deal(self, plan: Plan, like: Deal | None = None) -> Deal:
        """What a plan deals out; of one that differs from a plan in its tables only, with what that computes."""
        self.worked += len(self.profile.modules)
        if like is not None and dense_tables(plan, self.profile) == dense_tables(like.plan, self.profile):
            return like.with_tables(plan)
        return Deal.of(plan, self.profile, self.cluster, batch=self.batch, tariff=self.tariff)

    def _least_of(self, deal: Deal) -> float:
        """What no plan takes less than that differs in its schedule and buckets, or recomputes more."""
        schedules = self.space.schedules_for(deal.plan.mesh, deal.plan.memory)
        return min(self._scored(deal, schedule) for schedule in schedules)

    def _scored(self, deal: Deal, schedule: str) -> float:
        return handicap(schedule, deal.plan.memory) * least_seconds(deal.under(replace(deal.plan, schedule=schedule)))

    def _may_split(self, frame: Plan) -> bool:
        """Whether tables may be split beside what is saved on memory."""
        memory = frame.memory
        return not memory.full_shard and (self.space.shares_with_tables or not memory.shard_optimizer)

    def _cuts(self, frame: Plan, share: Share) -> Iterator[Plan]:
        """With the stage of each piece."""
        names = [piece.name for piece in self.profile.modules]
        if share.pipe == 1:
            yield frame
            return
        for schedule in self.space.pipeline_schedules:
            if math.comb(len(names) - 1, share.pipe - 1) <= MOST_CUTS:
                found = [*cuts(len(names), share.pipe)]
            else:
                self._left_out_s = min(self._left_out_s, self.least_s(frame))
                network = share.network(PIPE, self.cluster, self.profile)
                found = fast_cuts(self._bound.pieces(share), share.pipe, network)
            for stages in found:
                placed = placed_as_one(dict(zip(names, stages, strict=True)), self._around)
                yield replace(frame, stages=placed, pipeline_schedule=schedule)

    def _fit(self, deal: Deal, frame_s: float) -> None:
        """Evaluate a plan, with as much recomputed as it takes to fit."""
        plan = deal.plan
        whole = self._peaks(deal)
        if self.memory_bytes is None or max(whole) <= self.memory_bytes:
            self._evaluate(deal, whole)
            return
        self._note_least(max(whole), plan)

        def peaks(memory: Memory) -> tuple[int, ...]:
            return self._peaks(self._deal(replace(plan, memory=memory)))

        found = with_recomputed(plan, self.profile, peaks, self.memory_bytes) if self.space.recomputes else None
        for memory in found.memories if found else ():
            recomputing = self._deal(replace(plan, memory=memory))
            self._evaluate(recomputing, self._peaks(recomputing))
        if found and not found.is_exact:
            self._left_out_s = min(self._left_out_s, frame_s)
        if found:
            self._note_least(found.least_bytes, replace(plan, memory=found.everything))

    def _note_least(self, needed_bytes: int, plan: Plan) -> None:
        if needed_bytes < self._least_bytes:
            self._least_bytes, self._least = needed_bytes, plan

    def _refusal(self) -> str:
        """That no plan fits: what the one that needs least needs it for, and how much is missing."""
        assert self._least is not None, "nothing was looked at"
        deal = self._deal(self._least)
        needed = footprints_of(deal.plan, self.profile, deal.share, deal.works, self.tariff)
        parts = max(needed, key=lambda one: one.peak_bytes).parts_bytes()
        limit_bytes = self.memory_bytes or 0
        return (
            f"no plan fits in {limit_bytes:,} bytes a rank on {self.cluster.ranks} ranks, the least needs "
            f"{self._least_bytes:,.0f}, {self._least_bytes - limit_bytes:,.0f} more ("
            + ", ".join(f"{name} {size:,}" for name, size in parts.items())
            + "): use more ranks, a smaller batch, or free what the space fixes"
        )

    def _peaks(self, deal: Deal) -> tuple[int, ...]:
        """Bytes that each rank of axis `pipe` needs."""
        needed = footprints_of(deal.plan, self.profile, deal.share, deal.works, self.tariff)
        return tuple(one.peak_bytes for one in needed)

    def _evaluate(self, deal: Deal, memory_bytes: tuple[int, ...]) -> None:
        for schedule in self.space.schedules_for(deal.plan.mesh, deal.plan.memory):
            if self._scored(deal, schedule) >= self.cutoff_s:
                continue
            layouts: set[object] = set()
            for bucket_bytes in self.space.buckets_bytes:
                tried = deal.under(replace(deal.plan, schedule=schedule, bucket_bytes=bucket_bytes))
                layout = tuple((bucket.number, bucket.is_carried) for bucket in tried.buckets())
                if layout not in layouts:
                    layouts.add(layout)
                    self._keep(tried, memory_bytes)

    def _keep(self, deal: Deal, memory_bytes: tuple[int, ...]) -> None:
        """Simulate a plan, and keep it if none of its kind is faster."""
        step = lowered(deal)
        forecast = run(step)
        self.worked += STEP_WORK + len(step.tasks)
        others = self.space.schedules_for(deal.plan.mesh, deal.plan.memory)
        if (
            deal.plan.schedule == AT_READ
            and AT_STEP in others
            and put_off_s(forecast.by_kind, lookahead=deal.lookahead) < WORTH_S
        ):
            return
        unhidden_s = deal.unhidden_s
        found = Found(
            handicap(deal.plan.schedule, deal.plan.memory) * forecast.step_s + unhidden_s,
            deal.plan,
            forecast,
            memory_bytes,
            unhidden_s,
        )
        key = decided(deal.plan)
        if key not in self._best or found.score_s < self._best[key].score_s:
            self._best[key] = found

    def _told(self, ordered: Sequence[Found], bound_s: float) -> Plan:
        """The best with all that is known of it."""
        best = ordered[0]
        share = share_of(best.plan, self.profile, self.batch)
        network = share.network(DATA, self.cluster, self.profile)
        tables = Tables(self.profile, self.cluster, share, self.tariff, self.space.schemes)
        plan = tables.told(best.plan)
        second = ordered[1] if len(ordered) > 1 else None
        prediction = Prediction(
            batch=self.batch,
            ranks=self.cluster.ranks,
            step_s=best.forecast.step_s,
            parts_s=parts_of(best.forecast),
            links_s=links_of(best.forecast),
            memory_bytes=best.memory_bytes,
            bound_s=bound_s / handicap(best.plan.schedule, best.plan.memory),
            runner_up=tuple(differences(best.plan, second.plan)) if second else (),
            runner_up_s=second.forecast.step_s + second.unhidden_s if second else None,
            binding=binding(best.forecast),
            lookahead=self.profile.lookahead,
        )
        network = network if share.data > 1 else None
        return replace(plan, network=network, offers=self._offers(best), prediction=prediction)

    def _offers(self, best: Found) -> tuple[str, ...]:
        """What a loop through `tulle.lookahead` would gain."""
        if self.profile.lookahead or not best.plan.placements or best.plan.mesh.get(DATA, 1) == 1:
            return ()
        ahead_s = run(lowered(replace(self._deal(best.plan), lookahead=True))).step_s
        if ahead_s > (1 - WORTH_OFFERING) * best.forecast.step_s:
            return ()
        return (
            f"for batch in tulle.lookahead(loader): rows of split tables are then told a step ahead, and a step takes "
            f"{ms(ahead_s)} instead of {ms(best.forecast.step_s)}",
        )
