"""`best_plan`: the plan of least predicted seconds that fits in memory, by branch and bound over what can be chosen.

    mesh, memory, micro-batches     all of them, the least lower bound first, until no bound is below the best
      cut into stages               all if they are few, else the one that promises most (dynamic programming)
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
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import product

from tulle.errors import PlanError
from tulle.memory import Memory
from tulle.pipeline.calls import placed_as_one
from tulle.pipeline.schedule import checked, is_split
from tulle.plan.answer import refusal, told
from tulle.plan.bound import Bound
from tulle.plan.choices import splits
from tulle.plan.crowding import Crowding
from tulle.plan.cutting import fast_cut
from tulle.plan.deal import Deal
from tulle.plan.exchange import Tariff
from tulle.plan.explanation import MemoryLackedError
from tulle.plan.found import Found, decided, handicap
from tulle.plan.lateness import WORTH_S, put_off_s
from tulle.plan.limit import least_seconds
from tulle.plan.lower import lowered
from tulle.plan.moving import on_machine
from tulle.plan.plan import AT_READ, AT_STEP, MODEL, PIPE, Plan
from tulle.plan.problem import Problem
from tulle.plan.saving import with_recomputed
from tulle.plan.space import MOST_CUTS, Space, cuts
from tulle.plan.work import DATA, Share, dense_tables, total_s, work_of
from tulle.simulate import run
from tulle.workload import Cluster, Profile

MOST_WORK = 60_000
"""After so many tasks and pieces, some seconds, the search ends with the best so far, on all ranks alike."""
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
    return Search(Problem(moved, cluster, samples, space, limit_bytes, tariff or Tariff(profile))).run()


@dataclass(slots=True)
class Search:
    """Branch and bound.

    Args:
        problem: What the best plan is sought for.
    """

    problem: Problem
    worked: int = field(init=False, default=0)
    """Tasks that were lowered, and pieces whose memory was weighed."""
    _bound: Bound = field(init=False)
    _around: dict[str, tuple[str, ...]] = field(init=False)
    _best: dict[object, Found] = field(init=False, default_factory=dict)
    """By what was decided, buckets apart."""
    _left_out_s: float = field(init=False, default=math.inf)
    """What no plan that was not looked at takes less than."""
    _least_bytes: float = field(init=False, default=math.inf)
    """What the fullest rank needs of the least plan that did not fit."""
    _least: Plan | None = field(init=False, default=None)
    """That plan."""

    def __post_init__(self) -> None:
        problem = self.problem
        puts_off = any(is_split(checked(schedule)) for schedule in problem.space.pipeline_schedules)
        self._bound = Bound(problem.profile, problem.cluster, puts_off)
        self._around = {piece.name: piece.around for piece in problem.profile.modules}

    def run(self) -> Plan:
        """The best plan, with its prediction."""
        meshes = self.problem.meshes()
        plain = [Plan(mesh) for mesh in meshes if set(mesh) == {DATA} and Memory() in self.problem.space.memories]
        for frame in plain:  # what needs no stages is looked at in any case: other plans must be faster
            if self.problem.batch >= frame.mesh[DATA]:
                self._branch(frame)
        for bound_s, plan in self._frames():
            if bound_s >= self.cutoff_s or self.is_spent:
                self._left_out_s = min(self._left_out_s, bound_s)
                break
            if plan not in plain:
                self._branch(plan)
        ordered = self.found()
        if ordered:
            return told(self.problem, ordered, min(self._left_out_s, ordered[0].score_s))
        if self._least is not None:
            raise MemoryLackedError(refusal(self.problem, self._least))
        raise PlanError(self.problem.emptiness())

    def found(self) -> list[Found]:
        """The best of each kind of plan that was evaluated, the best first."""
        return sorted(self._best.values(), key=lambda found: found.score_s)

    @property
    def is_spent(self) -> bool:
        """Whether it has looked at as much as it may."""
        return self.worked + self.problem.tariff.worked >= MOST_WORK

    @property
    def cutoff_s(self) -> float:
        """The runner-up: what is slower is neither."""
        scores = sorted(found.score_s for found in self._best.values())
        return scores[1] if len(scores) > 1 else math.inf

    def _frames(self) -> Iterator[tuple[float, Plan]]:
        """What plans begin with, each with its lower bound, the least first."""
        frames = self.problem.frames()
        rough = sorted((self.least_s(frame, is_sharp=False), number, frame) for number, frame in enumerate(frames))
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
        share = self.problem.share(plan)
        return min(
            handicap(schedule, plan.memory) * self._bound.seconds(share, plan.memory, schedule, is_sharp=is_sharp)
            for schedule in self.problem.schedules(plan)
        )

    def _branch(self, frame: Plan) -> None:
        share = self.problem.share(frame)
        frame_s = self.least_s(frame)
        tables = self.problem.tables(share)
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
        tables = self.problem.profile.tables
        is_bound = bool(tables) and all(table.is_sparse for table in tables)
        return is_bound and self._least_of(self._deal(dealt)) >= self.cutoff_s

    def _dealt(self, frame: Plan, share: Share) -> list[tuple[float, Plan]]:
        """Ways to cut and to split, each with the seconds that its slowest stage takes at least, the least first."""
        profile, cluster = self.problem.profile, self.problem.cluster
        network = share.network(MODEL, cluster, profile)
        crowding = Crowding.of(cluster.machine, share.mesh)
        ease = crowding.least if crowding else 1.0
        found: list[tuple[float, Plan]] = []
        for cut, split in product(self._cuts(frame, share), splits(profile, cluster, share)):
            dealt = replace(cut, tensor_parallel=split)
            by_stage = [0.0] * share.pipe
            for work in work_of(dealt, profile, share, network):
                by_stage[work.stage] += share.micro_batches * total_s(work)
            found.append((ease * max(by_stage), dealt))
        return sorted(found, key=lambda one: one[0])

    def _deal(self, plan: Plan, like: Deal | None = None) -> Deal:
        """What a plan deals out; of one that differs from a plan in its tables only, with what that computes."""
        profile = self.problem.profile
        self.worked += len(profile.modules)
        if like is not None and dense_tables(plan, profile) == dense_tables(like.plan, profile):
            return like.with_tables(plan)
        return self.problem.deal(plan)

    def _least_of(self, deal: Deal) -> float:
        """What no plan takes less than that differs in its schedule and buckets, or recomputes more."""
        return min(self._scored(deal, schedule) for schedule in self.problem.schedules(deal.plan))

    def _scored(self, deal: Deal, schedule: str) -> float:
        return handicap(schedule, deal.plan.memory) * least_seconds(deal.under(replace(deal.plan, schedule=schedule)))

    def _may_split(self, frame: Plan) -> bool:
        """Whether tables may be split beside what is saved on memory."""
        memory = frame.memory
        return not memory.full_shard and (self.problem.space.shares_with_tables or not memory.shard_optimizer)

    def _cuts(self, frame: Plan, share: Share) -> Iterator[Plan]:
        """With the stage of each piece."""
        names = [piece.name for piece in self.problem.profile.modules]
        if share.pipe == 1:
            yield frame
            return
        for schedule in self.problem.space.pipeline_schedules:
            if math.comb(len(names) - 1, share.pipe - 1) <= MOST_CUTS:
                found = [*cuts(len(names), share.pipe)]
            else:
                self._left_out_s = min(self._left_out_s, self.least_s(frame))
                network = share.network(PIPE, self.problem.cluster, self.problem.profile)
                found = [
                    fast_cut(
                        self._bound.pieces(share),
                        share.pipe,
                        network,
                        micro_batches=share.micro_batches,
                        once_s=self._bound.once_s(share, frame.memory),
                    )
                ]
            for stages in found:
                placed = placed_as_one(dict(zip(names, stages, strict=True)), self._around)
                yield replace(frame, stages=placed, pipeline_schedule=schedule)

    def _fit(self, deal: Deal, frame_s: float) -> None:
        """Evaluate a plan, with as much recomputed as it takes to fit."""
        plan, problem, limit_bytes = deal.plan, self.problem, self.problem.memory_bytes
        whole = self._peaks(deal)
        if limit_bytes is None or max(whole) <= limit_bytes:
            self._evaluate(deal, whole)
            return
        self._note_least(max(whole), plan)

        def peaks(memory: Memory) -> tuple[int, ...]:
            return self._peaks(self._deal(replace(plan, memory=memory)))

        found = with_recomputed(plan, problem.profile, peaks, limit_bytes) if problem.space.recomputes else None
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

    def _peaks(self, deal: Deal) -> tuple[int, ...]:
        """Bytes that each rank of axis `pipe` needs."""
        return tuple(one.peak_bytes for one in self.problem.footprints(deal))

    def _evaluate(self, deal: Deal, memory_bytes: tuple[int, ...]) -> None:
        for schedule in self.problem.schedules(deal.plan):
            if self._scored(deal, schedule) >= self.cutoff_s:
                continue
            layouts: set[object] = set()
            for bucket_bytes in self.problem.space.buckets_bytes:
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
        others = self.problem.schedules(deal.plan)
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
