"""Parameters that the ranks of each host share out among themselves cost what the run-time does."""

from dataclasses import replace

import pytest

from profiles import cluster_of, profile_of
from tulle.plan import Memory, Plan, Space, best_plan, footprints, lower
from tulle.simulate import run

HOSTS, LOCAL = 2, 4
CLUSTER = cluster_of(HOSTS, LOCAL)
OVER_ALL, WITHIN_HOSTS = Memory(full_shard=True), Memory(full_shard="host")


def without_tables():
    profile = profile_of()
    return replace(profile, tables=())


def step_of(memory, cluster=CLUSTER):
    return lower(Plan({"data": cluster.ranks}, memory=memory), without_tables(), cluster)


def test_a_rank_keeps_its_share_of_its_hosts():
    profile = without_tables()
    [within], [over_four] = (
        footprints(Plan({"data": cluster.ranks}, memory=memory), profile, cluster)
        for memory, cluster in ((WITHIN_HOSTS, CLUSTER), (OVER_ALL, cluster_of(1, LOCAL)))
    )
    assert within == over_four


def test_what_travels_between_hosts_is_one_sum_of_each_part():
    profile = without_tables()
    parameters_bytes = sum(piece.parameters_bytes for piece in profile.modules)
    within, over_four = step_of(WITHIN_HOSTS), step_of(OVER_ALL, cluster_of(1, LOCAL))
    sent, sent_within = (sum(task.sent_bytes for task in step.tasks) for step in (within, over_four))
    between_bytes = 2 * (HOSTS - 1) / HOSTS * parameters_bytes / LOCAL
    assert sent - sent_within == pytest.approx(between_bytes, rel=1e-3)


def test_where_links_between_hosts_are_slow_it_is_faster_and_on_one_host_the_same():
    slow = cluster_of(HOSTS, LOCAL, bandwidth_bytes_per_s=1e7)
    assert run(step_of(WITHIN_HOSTS, slow)).step_s < 0.5 * run(step_of(OVER_ALL, slow)).step_s
    alone = cluster_of(1, LOCAL)
    assert run(step_of(WITHIN_HOSTS, alone)).step_s == run(step_of(OVER_ALL, alone)).step_s


def test_it_is_chosen_where_memory_asks_for_it():
    profile = without_tables()
    data = {"pipe": 1, "model": 1}
    [within] = footprints(Plan({"data": CLUSTER.ranks}, memory=WITHIN_HOSTS), profile, CLUSTER)
    memories = Space().memories
    plan = best_plan(
        profile,
        CLUSTER,
        memory_bytes=within.peak_bytes + 1,
        space=Space(mesh=data, memories=memories, recomputes=False),
    )
    assert plan.memory == WITHIN_HOSTS
    assert "shared out over the ranks of each host" in "\n".join(plan.memory.explain())


@pytest.mark.parametrize(("hosts", "local"), [(1, 4), (4, 1)])
def test_hosts_that_cannot_are_not_offered_it(hosts, local):
    cluster = cluster_of(hosts, local)
    local_ranks = cluster.network(cluster.ranks).local_ranks
    offered = Space().memories_for(without_tables(), cluster.ranks, local_ranks=local_ranks)
    assert OVER_ALL in offered
    assert WITHIN_HOSTS not in offered
