"""What happens to each table, and which layers axis `model` splits: all that is worth a look on one mesh."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from tulle.cost import NOTHING, Network, all_reduce_cost, percent
from tulle.plan.exchange import REPLICA, Exchange, Tariff, bundles
from tulle.plan.plan import MODEL, Plan
from tulle.plan.prediction import ms
from tulle.plan.space import MOST_SUBSETS, subsets
from tulle.plan.table_plan import TablePlan, ratios
from tulle.plan.work import DATA, Share, stages_of, total_s, work_of
from tulle.sync import AUTO
from tulle.workload import Cluster, Profile, TableProfile

MOST_COMBINATIONS = 64
"""If there are more ways to treat the tables of a model, each kind of tables takes the way that is best for it."""

PACKETS = "in one message with row numbers and counts"


@dataclass(frozen=True, slots=True)
class Tables:
    """Ways to treat the tables of a model on one mesh.

    Args:
        profile: Of the model.
        cluster: What it runs on.
        share: How a step is dealt.
        tariff: What exchanges cost.
        given: Schemes and placements that are settled, by table.
    """

    profile: Profile
    cluster: Cluster
    share: Share
    tariff: Tariff
    given: Mapping[str, str]

    @property
    def network(self) -> Network:
        """Of axis `data`."""
        return self.share.network(DATA, self.cluster, self.profile)

    def all(self, plan: Plan, *, is_whole: bool) -> Iterator[Plan]:
        """The plan with each combination of ways for its tables; those that travel as one go one way.

        Args:
            plan: With the stage of each piece.
            is_whole: Whether every rank must have every table whole.
        """
        groups = self._groups(plan)
        ways = [self._ways(plan, names, beside, is_whole=is_whole) for names, beside in groups.items()]
        if math.prod(map(len, ways)) > MOST_COMBINATIONS:
            ways = [[min(found, key=total_of)] for found in ways]
        for combination in product(*ways):
            schemes = {name: one.scheme for names, one in zip(groups, combination, strict=True) for name in names}
            yield replace(plan, tables=self._planned(schemes))

    def is_complete(self, plan: Plan) -> bool:
        """Whether `all` gives all combinations."""
        ways = [self._ways(plan, names, beside, is_whole=False) for names, beside in self._groups(plan).items()]
        return math.prod(map(len, ways)) <= MOST_COMBINATIONS

    def told(self, plan: Plan) -> Plan:
        """The plan with the numbers that led to what happens to each table."""
        if self.share.data == 1:
            reason = f"one rank along {DATA} has all gradients"
            return replace(plan, tables=tuple(replace(table, reason=reason) for table in plan.tables))
        groups = {name: (names, beside) for names, beside in self._groups(plan).items() for name in names}
        return replace(plan, tables=tuple(self._told(plan, table, *groups[table.name]) for table in plan.tables))

    def _told(self, plan: Plan, table: TablePlan, names: Sequence[str], beside: Sequence[str]) -> TablePlan:
        looks = self.tariff.looks(table.name, self.share.data, self.share.batches)
        options = sorted(self._ways(plan, names, beside, is_whole=False), key=total_of)
        costs = {one.scheme: one.total for one in options}
        if not self.tariff.table(table.name).is_sparse:  # in the buckets, among other dense gradients
            costs[REPLICA] = all_reduce_cost(looks.dense_bytes, self.network, self.share.data)
        others = ", ".join(f"{name} {ms(cost.seconds)}" for name, cost in costs.items() if name != table.scheme)
        reason = f"{percent(looks.density)} of {looks.num_rows:,} rows touched a rank and step, {self.share.data} ranks"
        if table.scheme in costs:
            way = PACKETS if table.scheme == AUTO else table.scheme
            reason += f": {way} {ms(costs[table.scheme].seconds)}" + (f", {others}" if others else "")
            reason += f", {len(names)} tables together" if len(names) > 1 else ""
        return replace(table, reason=reason, density=looks.density, candidates=costs, characteristics=ratios(looks))

    def _groups(self, plan: Plan) -> dict[tuple[str, ...], list[str]]:
        """Tables that can travel as one, with the others whose rows could be in the same packets."""
        stages = dict(zip((piece.name for piece in self.profile.modules), stages_of(plan, self.profile), strict=True))

        def stage_of(table: TableProfile) -> int:
            return stages.get(table.module, 0)

        seen = [table for table in self.profile.tables if table.stream or table.tokens]
        free = [table for table in seen if table.name not in self.given]
        found = {
            names: [one.name for one in free if one.name not in names and stage_of(one) == stage]
            for names in bundles(free, stage_of)
            for stage in [stage_of(self.tariff.table(names[0]))]
        }
        return found | {(table.name,): [] for table in seen if table.name in self.given}

    def _ways(self, plan: Plan, names: Sequence[str], beside: Sequence[str], *, is_whole: bool) -> list[Exchange]:
        ranks, batches = self.share.data, self.share.batches
        scheme = self.given.get(names[0], "")
        if scheme and scheme != AUTO:
            return [self.tariff.exchange(names, scheme, self.network, ranks=ranks, batches=batches)]
        found = self.tariff.options(names, self.network, ranks=ranks, batches=batches, beside=beside)
        is_dense = not self.tariff.table(names[0]).is_sparse and not scheme
        if is_dense and (plan.memory.full_shard or self.share.model > 1):  # which take it for a parameter like others
            found = [Exchange(REPLICA, NOTHING, NOTHING), *(one for one in found if one.is_split)]
        is_whole = is_whole or scheme == AUTO  # one of the schemes, whichever
        return [one for one in found if not (is_whole and one.is_split)]

    def _planned(self, schemes: Mapping[str, str]) -> tuple[TablePlan, ...]:
        """Of tables that are split or travel by rows; one with sparse gradients without a stream is left to be seen."""
        return tuple(
            TablePlan(table.name, table.rows, table.width, scheme)
            for table in self.profile.tables
            if (scheme := schemes.get(table.name, AUTO if table.is_sparse else REPLICA)) != REPLICA
        )


def total_of(exchange: Exchange) -> float:
    """Seconds of all that is sent."""
    return exchange.total.seconds


def splits(profile: Profile, cluster: Cluster, share: Share) -> list[tuple[str, ...]]:
    """Names of the modules that axis `model` splits: every subset if they are few, else all and those that gain."""
    names = [piece.name for piece in profile.modules if piece.split]
    if share.model == 1:
        return [()]
    if len(names) <= MOST_SUBSETS:
        return [subset for subset in subsets(names) if subset]
    network = share.network(MODEL, cluster, profile)
    whole = work_of(Plan({DATA: 1}), profile, share, network)
    split = work_of(Plan({DATA: share.data, MODEL: share.model}), profile, share, network)
    gaining = tuple(one.name for one, other in zip(split, whole, strict=True) if total_s(one) < total_s(other))
    return [*dict.fromkeys(found for found in (tuple(names), gaining) if found)]
