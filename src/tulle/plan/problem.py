"""`Problem`: what the best plan is sought for; what its plans begin with, and what each comes to in numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tulle.plan.choices import Tables
from tulle.plan.deal import Deal
from tulle.plan.exchange import Tariff
from tulle.plan.footprint import Footprint, footprints_of
from tulle.plan.plan import Plan
from tulle.plan.space import Space
from tulle.plan.work import DATA, Share, share_of
from tulle.workload import Cluster, Profile


@dataclass(frozen=True, slots=True)
class Problem:
    """What the best plan is sought for.

    Args:
        profile: What the model does on the cluster's machines.
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

    def meshes(self) -> list[dict[str, int]]:
        """All arrangements of the ranks that the model can use.

        Raises:
            PlanError: If there is none.
        """
        return self.space.meshes(self.cluster.ranks, self.profile)

    def frames(self) -> Iterator[Plan]:
        """What plans begin with: a mesh, a way of saving memory, and micro-batches; each replica has a sample."""
        is_tight = self.memory_bytes is not None
        for mesh in self.meshes():
            samples = self.batch / mesh[DATA]
            local_ranks = Share(mesh, samples).network(DATA, self.cluster, self.profile).local_ranks
            memories = self.space.memories_for(self.profile, mesh[DATA], local_ranks=local_ranks, is_tight=is_tight)
            for memory in memories if samples >= 1 else ():
                for micro_batches in self.space.micro_batches(self.profile, mesh, samples, is_tight=is_tight):
                    yield Plan(mesh, memory=memory, micro_batches=micro_batches)

    def emptiness(self) -> str:
        """Why there are none."""
        return self.space.emptiness(self.cluster.ranks, self.profile, self.batch)

    def schedules(self, plan: Plan) -> list[str]:
        """When a plan's replicas can be updated."""
        return self.space.schedules_for(plan.mesh, plan.memory)

    def share(self, plan: Plan) -> Share:
        """How a step is dealt."""
        return share_of(plan, self.profile, self.batch)

    def tables(self, share: Share) -> Tables:
        """Ways to treat the tables."""
        return Tables(self.profile, self.cluster, share, self.tariff, self.space.schemes)

    def deal(self, plan: Plan) -> Deal:
        """A plan in numbers."""
        return Deal.of(plan, self.profile, self.cluster, batch=self.batch, tariff=self.tariff)

    def footprints(self, deal: Deal) -> list[Footprint]:
        """What each rank of axis `pipe` needs."""
        return footprints_of(deal.plan, self.profile, deal.share, deal.works, self.tariff, deal.network)
