"""`Deal`: how a plan deals a step to ranks: what each computes, what tables exchange and stages send each other.

It is the same whenever replicas are updated and whatever the size of buckets, so that a search works it out once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tulle.cost import Cost, Network, exchange_cost
from tulle.engine.turns import best_piece_bytes
from tulle.errors import PlanError
from tulle.plan.bucket import Bucket, buckets_of, by_urgency
from tulle.plan.bundle import Bundle, bundles_of
from tulle.plan.exchange import Tariff
from tulle.plan.moving import on_machine
from tulle.plan.plan import AT_READ, MODEL, PIPE, Plan
from tulle.plan.update import Update, rest_s
from tulle.plan.work import AXES, DATA, Share, Work, share_of, stage_around, work_of
from tulle.sync import AUTO
from tulle.workload import Cluster, Machine, Profile

LOOKUP_CALLS, SPLIT_LOOKUP_CALLS = 1.5, 2.0
"""What a lookup takes there and back, in calls of a placed module, where gradients of its table travel as rows, however
few, and where the table is split: measured, processor time of 26 tables."""

TRIPS = 5.0
"""What the trips of a stage's split tables take of a micro-batch besides, in what it takes besides its modules: row
numbers, rows and gradients go by a thread for which this one waits, and by gloo's. Measured on ranks of a core each."""

MESSAGES = 1.0
"""What sending or hearing a value of another stage takes of the processor, in what a micro-batch takes besides its
modules: of GPT-2 on a CPU."""


@dataclass(frozen=True, slots=True)
class Deal:
    """A plan for a profiled model on a cluster, in numbers.

    Args:
        plan: The plan.
        profile: On the cluster's machines.
        machine: Of the cluster.
        share: How the step is dealt.
        network: Of axis `data`.
        works: Pieces in the order in which they run.
        bundles: Tables that travel as one.
        flows: What one stage sends another of one micro-batch.
        tariff: What exchanges cost.
        lookahead: Whether the loop goes through `tulle.lookahead`.
    """

    plan: Plan
    profile: Profile
    machine: Machine
    share: Share
    network: Network
    works: Sequence[Work]
    bundles: Sequence[Bundle]
    flows: Mapping[tuple[int, int], Cost]
    tariff: Tariff
    lookahead: bool

    @staticmethod
    def of(
        plan: Plan,
        profile: Profile,
        cluster: Cluster,
        *,
        batch: int | None = None,
        lookahead: bool | None = None,
        tariff: Tariff | None = None,
    ) -> Deal:
        """Arguments as for `tulle.plan.lower`.

        Raises:
            PlanError: If the plan does not fit the profile.
        """
        profile = on_machine(profile, cluster.machine)
        share = share_of(plan, profile, batch)
        networks = {axis: share.network(axis, cluster, profile) for axis in AXES}
        works = work_of(plan, profile, share, networks[MODEL])
        tariff = tariff or Tariff(profile)
        bundles = bundles_of(plan, works, share, networks[DATA], tariff)
        flows = flows_of(works, share, networks[PIPE])
        is_ahead = looks_ahead(plan, profile) if lookahead is None else lookahead
        deal = Deal(plan, profile, cluster.machine, share, networks[DATA], works, bundles, flows, tariff, is_ahead)
        return deal.under(plan)

    def under(self, plan: Plan) -> Deal:
        """The same under a plan that differs in its schedule and the size of its buckets only.

        Raises:
            PlanError: If it has stages, and its schedule is not one for them.
        """
        if plan.schedule == AT_READ and self.share.pipe > 1:
            raise PlanError("the plan has updates wait for reads, and stages: in a pipeline give schedule='step'")
        return replace(self, plan=plan)

    def with_tables(self, plan: Plan) -> Deal:
        """The same under a plan that differs in what happens to tables only, and in that not to dense replicas."""
        return replace(self, plan=plan, bundles=bundles_of(plan, self.works, self.share, self.network, self.tariff))

    @property
    def is_late(self) -> bool:
        """Whether parameters are updated when the next step reads them."""
        return self.plan.schedule == AT_READ and self.share.data > 1

    @property
    def stages(self) -> int:
        """How many there are."""
        return max(work.stage for work in self.works) + 1

    def calls_s(self, stage: int) -> tuple[float, float, float]:
        """What the run-time takes of a micro-batch before a stage, in it, and behind it: lookups, modules and messages.

        All ranks run the whole program. Before a stage, that is from the rank's stage before it on; behind it, only if
        it is the rank's last. Operations between modules are taken to be spread evenly.
        """
        pipe, machine = self.share.pipe, self.machine
        bundles = [bundle for bundle in self.bundles if bundle.stage == stage and self.share.data > 1]
        calls = sum(len(one.names) * (SPLIT_LOOKUP_CALLS if one.exchange.is_split else LOOKUP_CALLS) for one in bundles)
        trips = TRIPS if any(one.exchange.is_split for one in bundles) else 0.0
        lookups_s = calls * machine.call_s + trips * machine.micro_batch_s
        if pipe == 1:
            return 0.0, lookups_s, 0.0
        placed = self.plan.stages
        before, here = (
            sum(first < one <= last for one in placed.values())
            for first, last in ((stage - pipe, stage - 1), (stage - 1, stage))
        )
        behind = sum(one > stage for one in placed.values()) if stage + pipe >= self.stages else 0
        between = sum(count for name, count in self.profile.between.items() if stage_around(placed, name) is None)
        call_s = machine.call_s + machine.operation_s * between / max(1, len(placed))
        begin_s = machine.micro_batch_s if stage < pipe else 0.0
        messages = 2 * sum(stage in pair and (pair[0] - pair[1]) % pipe != 0 for pair in self.flows)
        messages_s = MESSAGES * messages * machine.micro_batch_s
        return begin_s + before * call_s, here * call_s + lookups_s + messages_s, behind * call_s

    @property
    def unhidden_s(self) -> float:
        """By how much split tables send for longer than packets would in which they could travel, beside work or not.

        What so small an exchange takes, it takes of the processor: as much beside the model's work as behind it. Row
        numbers that are told in forward are not hidden in any case.
        """
        ranks, batches, seconds = self.share.data, self.share.batches, 0.0
        for bundle in self.bundles:
            if bundle.exchange.is_split and ranks > 1:
                others = [one for one in self.bundles if one.stage == bundle.stage and one is not bundle]
                beside = [name for one in others for name in one.names]
                options = self.tariff.options(bundle.names, self.network, ranks=ranks, batches=batches, beside=beside)
                sent = bundle.exchange.total if self.lookahead else bundle.exchange.values + bundle.exchange.values
                sent_s = self.share.micro_batches * sent.seconds
                seconds += sum(max(0.0, sent_s - one.total.seconds) for one in options if one.scheme == AUTO)
        return seconds

    @property
    def update(self) -> Update:
        """What the optimizer takes."""
        return Update(self.plan, self.profile, self.share, self.network, self.tariff, self.lookahead)

    def pieces(self, stage: int) -> list[Work]:
        """Those of a stage."""
        return [work for work in self.works if work.stage == stage]

    def buckets(self) -> list[Bucket]:
        """Dense gradients that travel together, in the order in which they are sent."""
        if self.share.data == 1 or self.plan.memory.full_shard:
            return []
        limit_bytes = self.plan.bucket_bytes
        if self.is_late:  # smaller, so that they can be waited for one by one
            limit_bytes = min(limit_bytes, best_piece_bytes(self.network, self.share.data))
        found: list[Bucket] = []
        for stage in range(self.stages):
            found += buckets_of(self.pieces(stage), limit_bytes, self.network, self.share.data)
        if self.is_late:
            found = by_urgency(found, self._alone_on_link_s)
        return found

    @property
    def waits_for_update(self) -> bool:
        """Whether what is told and fetched for a step waits until the one before is over, if updates wait for reads."""
        return bool(self.bundles) and not self.update.delays_rows(self.bundles)

    @property
    def _alone_on_link_s(self) -> float:
        """How long from the begin of backward no rows of the next step pass dense gradients."""
        backward_s = sum(work.backward_s + work.all_reduced_again.seconds for work in self.works)
        if not self.waits_for_update:
            return backward_s
        return backward_s + self.update.tables_s(self.bundles) + rest_s(self.profile, self.share)


def looks_ahead(plan: Plan, profile: Profile) -> bool:
    """Whether a loop goes through `tulle.lookahead`: as the plan was made for, or else as the profile saw it."""
    return plan.prediction.lookahead if plan.prediction else profile.lookahead


def flows_of(works: Sequence[Work], share: Share, network: Network) -> dict[tuple[int, int], Cost]:
    """What each stage sends to others of one micro-batch: each value once, as large as it is read."""
    if share.pipe == 1:
        return {}
    stage_of = {work.name: work.stage for work in works}
    largest: dict[tuple[int, int], dict[str, int]] = {}
    for work in works:
        for name, size_bytes in work.reads.items():
            source = stage_of.get(name, work.stage)
            if source != work.stage:
                values = largest.setdefault((source, work.stage), {})
                values[name] = max(size_bytes, values.get(name, 0))
    pair_s = network.latency_s if network.pair_latency_s is None else network.pair_latency_s
    network = replace(network, latency_s=pair_s)
    return {pair: exchange_cost(sum(sizes.values()), 1, network) for pair, sizes in largest.items()}
