"""`lower`: a plan for a profiled model on a cluster, as the tasks of one step that the simulator runs.

    link      fetch rows                                       sum rows   bucket 1   bucket 0     gather stepped
    device                forward embed .. head   backward head .. body   backward embed    update

Tasks stand in the order in which the run-time begins them: turns of micro-batches as `tulle.pipeline` takes them,
buckets of dense gradients as they fill in backward, tables' exchanges where their last gradient is born. A link does
one thing after the other, where the run-time's process groups share it: what another stage waits for is sent first.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from tulle.pipeline.schedule import checked, is_split
from tulle.plan.contention import contended
from tulle.plan.crowding import Crowding, crowded
from tulle.plan.deal import Deal
from tulle.plan.dense_tasks import DenseTasks
from tulle.plan.exchange import Tariff
from tulle.plan.plan import PIPE, Plan
from tulle.plan.table_tasks import TableTasks
from tulle.plan.tasks import Run, Tasks
from tulle.plan.turns import Turn, turns
from tulle.plan.update import rest_s
from tulle.plan.work import Share, Work
from tulle.simulate import Step
from tulle.workload import Cluster, Profile

_COLD = 1.15
"""Gradients of weights take so much longer when they are put off: what they read has left the caches.

Measured, whole backwards in two halves: 1.04 of one for blocks of width 512, of which half are weights, 1.10 for GPT-2.
"""
_ROUNDING = 1e-6
"""Of a micro-batch."""


def lower(
    plan: Plan,
    profile: Profile,
    cluster: Cluster,
    *,
    batch: int | None = None,
    lookahead: bool | None = None,
    tariff: Tariff | None = None,
) -> Step:
    """The tasks of one step under a plan.

    Args:
        plan: With a stage for each piece of the profile, if its mesh has an axis `pipe`.
        profile: What the model does.
        cluster: What it runs on; as many ranks as the mesh has, or more.
        batch: Samples of a step, of all replicas; None for as many a rank as the plan was made for, or were measured.
        lookahead: Whether the loop goes through `tulle.lookahead`, so that row numbers are told a step earlier; None
            for what the plan was made for, or else the profile saw.
        tariff: What exchanges cost, if some are known already.

    Raises:
        PlanError: If the plan does not fit the profile.
    """
    return lowered(Deal.of(plan, profile, cluster, batch=batch, lookahead=lookahead, tariff=tariff))


def lowered(deal: Deal) -> Step:
    """The same of what is dealt already."""
    step = _Lowering(deal).step()
    crowding = Crowding.of(deal.machine, step.mesh)
    return contended(crowded(step, crowding) if crowding else step, deal.machine)


@dataclass(slots=True)
class _Lowering:
    """Writes one step."""

    deal: Deal
    tasks: Tasks = field(init=False)
    dense: DenseTasks = field(init=False)
    tables: TableTasks = field(init=False)
    calls_s: list[tuple[float, float, float]] = field(init=False)
    """What the run-time takes of a micro-batch before, in and behind each stage."""
    sent: dict[tuple[int, int, int, bool], int] = field(default_factory=dict)
    """The transfer from a stage to another of a micro-batch, forward or backward."""
    ends: dict[Turn, int] = field(default_factory=dict)
    """The last task of each turn."""
    over: dict[int, int] = field(default_factory=dict)
    """By rank of axis `pipe`, the last task of its last turn."""
    synchronized: defaultdict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    """By stage, what the optimizer waits for."""

    put_off_s: list[float] = field(init=False)
    """By stage, what is put off of the backward of a micro-batch: nobody waits for the first one's gradients."""
    owed: list[float] = field(init=False)
    """By stage, of how many micro-batches that is still to be computed."""
    waiting: dict[int, list[Work]] = field(default_factory=dict)
    """By stage, pieces whose gradients are sent when it is."""

    def __post_init__(self) -> None:
        self.tasks = Tasks(self.share.pipe)
        self.dense, self.tables = DenseTasks(self.deal, self.tasks), TableTasks(self.deal, self.tasks)
        self.put_off_s = [0.0] * self.deal.stages
        for work in self.deal.works:
            self.put_off_s[work.stage] += _COLD * self._put_off(work)
        self.owed = [float(self.share.micro_batches)] * self.deal.stages
        self.calls_s = [self.deal.calls_s(stage) for stage in range(self.deal.stages)]

    @property
    def plan(self) -> Plan:
        return self.deal.plan

    @property
    def share(self) -> Share:
        return self.deal.share

    def step(self) -> Step:
        """Write it."""
        for turn in self._turns():
            if turn.weights:
                self._catch_up(turn)
            elif turn.is_backward:
                self._backward(turn)
            else:
                self._forward(turn)
        for stage in range(self.deal.stages):
            self._end(stage)
        return Step(dict(self.plan.mesh), tuple(self.tasks.tasks))

    def _turns(self) -> Sequence[Turn]:
        forward_s, backward_s = [0.0] * self.deal.stages, [0.0] * self.deal.stages
        for work in self.deal.works:
            forward_s[work.stage] += work.forward_s + work.all_reduced.seconds
            backward_s[work.stage] += work.backward_s + (_COLD - 1) * self._put_off(work)
            backward_s[work.stage] += work.all_reduced_again.seconds
        for stage in range(self.deal.stages):
            forward_s[stage] += sum(self.calls_s[stage])
        schedule = checked(self.plan.pipeline_schedule)
        pipe, micro_batches = self.share.pipe, self.share.micro_batches
        return turns(schedule, tuple(forward_s), tuple(backward_s), pipe, micro_batches, tuple(self.put_off_s))

    def _put_off(self, work: Work) -> float:
        """Seconds of a piece's backward that are put off."""
        return work.weights_s if work.stage and is_split(checked(self.plan.pipeline_schedule)) else 0.0

    def _run(self, turn: Turn) -> Run:
        """The turn's pieces, which wait for what other stages send; where nothing is known of that, for their turns."""
        keys = [(other, turn.stage, turn.micro_batch, turn.is_backward) for other in range(self.deal.stages)]
        waits = [self.sent[key] for key in keys if key in self.sent]
        before = turn.stage + 1 if turn.is_backward else turn.stage - 1
        if not waits and 0 <= before < self.deal.stages:
            waits = [self.ends[Turn(before, turn.micro_batch, turn.is_backward)]]
        rank = turn.stage % self.share.pipe
        if rank in self.over:  # sums over axis `model` are waited for before the next turn
            waits.append(self.over[rank])
        label = f", micro-batch {turn.micro_batch}" if self.share.micro_batches > 1 else ""
        is_coarse = 0 < turn.micro_batch < self.share.micro_batches - 1
        verb = "backward" if turn.is_backward else "forward"
        return Run(self.tasks, turn.stage, verb, label, waits, is_coarse=is_coarse)

    def _along_model(self, work: Work) -> str:
        """What is done over axis `model` with what a piece makes."""
        split = self.deal.profile.modules[work.number].split
        if split is None or not split.gathered_bytes:
            return "all-reduce"
        return "all-reduce and gather" if split.all_reduced_bytes else "gather"

    def _pass_by(self, turn: Turn, seconds: float) -> None:
        """The rank runs the program past modules of others, which need not have come to them: shapes are known."""
        if seconds:
            self.tasks.compute(f"forward elsewhere, micro-batch {turn.micro_batch}", seconds, stage=turn.stage)

    def _forward(self, turn: Turn) -> None:
        before_s, here_s, behind_s = self.calls_s[turn.stage]
        self._pass_by(turn, before_s)
        run = self._run(turn)
        is_first = turn.micro_batch == 0
        fetched = self.tables.begin(run, is_first=is_first)
        if is_first:
            self.dense.begin(turn.stage)
        for work in self.deal.pieces(turn.stage):
            if is_first:
                self.dense.update_late(run, work)
            self.dense.gather(run, work)
            self.tables.look_up(run, work)
            run.add(work.name, work.forward_s + here_s, fetched.get(work.number, ()))
            here_s = 0.0
            run.sum_up(f"{self._along_model(work)} {work.name}", work.all_reduced)
        self._over(turn, run)
        self._pass_by(turn, behind_s)

    def _backward(self, turn: Turn) -> None:
        run = self._run(turn)
        is_last = turn.micro_batch == self.share.micro_batches - 1
        is_awaited = any(self._is_sent(turn, *flow) for flow in self.deal.flows) or self.put_off_s[turn.stage] > 0
        waiting: list[tuple[Work, list[int]]] = []
        for work in reversed(self.deal.pieces(turn.stage)):
            self.dense.gather(run, work)
            run.add(work.name, work.backward_s - self._put_off(work))
            run.sum_up(f"all-reduce gradient of {work.name}", work.all_reduced_again)
            if self._is_complete(work, is_last=is_last):
                waiting.append((work, run.write()))
                if not is_awaited:
                    self._synchronize(*waiting.pop(), is_last=is_last)
        self._over(turn, run)
        if self.put_off_s[turn.stage] and is_last:
            self.waiting[turn.stage] = [work for work, _ in waiting]
            return
        for work, after in waiting:
            self._synchronize(work, after, is_last=is_last)

    def _catch_up(self, turn: Turn) -> None:
        """Compute gradients of weights that were put off, all or a part; the last of a stage are sent."""
        name = f"backward to weights of stage {turn.stage}, micro-batch {turn.micro_batch}"
        index = self.tasks.compute(name, turn.weights * self.put_off_s[turn.stage], stage=turn.stage)
        self.over[turn.stage % self.share.pipe] = index
        self.owed[turn.stage] -= turn.weights
        if self.owed[turn.stage] < _ROUNDING:
            for work in self.waiting.pop(turn.stage, ()):
                self._synchronize(work, [index], is_last=True)

    def _over(self, turn: Turn, run: Run) -> None:
        """The turn's last task, and what is sent to other stages."""
        ended = run.end() or [self.tasks.compute("nothing", 0.0, stage=turn.stage)]  # of a stage without pieces
        self.ends[turn] = self.over[turn.stage % self.share.pipe] = ended[0]
        for (source, target), cost in self.deal.flows.items():
            if self._is_sent(turn, source, target):
                here, there = (target, source) if turn.is_backward else (source, target)
                name = f"send {'gradient of ' if turn.is_backward else ''}{turn.micro_batch} to stage {there}"
                index = self.tasks.send(name, cost, [self.ends[turn]], stage=here, axis=None, kind=PIPE)
                self.sent[here, there, turn.micro_batch, turn.is_backward] = index

    def _is_sent(self, turn: Turn, source: int, target: int) -> bool:
        """Whether a turn ends with sending what goes from one stage to another, or its gradient back."""
        here = target if turn.is_backward else source
        return here == turn.stage and source % self.share.pipe != target % self.share.pipe

    def _is_complete(self, work: Work, *, is_last: bool) -> bool:
        """Whether something can be sent when this piece's backward is over."""
        return self.dense.is_complete(work, is_last=is_last) or self.tables.is_complete(work, is_last=is_last)

    def _synchronize(self, work: Work, after: list[int], *, is_last: bool) -> None:
        """Send the gradients that are complete with a piece's backward."""
        self.synchronized[work.stage] += self.dense.synchronize(work, after, is_last=is_last)
        self.synchronized[work.stage] += self.tables.synchronize(work, after, is_last=is_last)

    def _end(self, stage: int) -> None:
        """The optimizer's step, and what follows it."""
        pieces = self.deal.pieces(stage)
        seconds = self.deal.update.tables_s([bundle for bundle in self.deal.bundles if bundle.stage == stage])
        seconds += 0.0 if self.deal.is_late else self.deal.update.dense_s(pieces)
        after = [*self.synchronized[stage], self.over[stage % self.share.pipe]]
        index = self.tasks.compute("update", seconds, after, stage=stage, kind="update")
        if self.plan.memory.shard_optimizer:
            index = self.dense.gather_stepped(stage, index)
        if stage < self.share.pipe:
            index = self.tasks.compute("rest of the step", rest_s(self.deal.profile, self.share), [index], stage=stage)
        if self.deal.is_late and self.deal.waits_for_update:
            for begun in self.tables.begun:
                self.tasks.wait_for_last(begun, [index])
