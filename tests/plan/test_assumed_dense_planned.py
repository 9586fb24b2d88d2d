"""Tables whose gradients are dense and zero in most rows are planned as they travel: by rows, and updated as ever."""

from dataclasses import replace

import pytest

from profiles import cluster_of, profile_of
from tulle.plan import Memory, Plan, Space, TablePlan, best_plan, footprints, lower
from tulle.plan.exchange import REPLICA, Tariff
from tulle.simulate import run
from tulle.tables import PLACEMENTS

CLUSTER = cluster_of(4)
LARGE = {"rows": 50_000, "is_sparse": False}
NAME = "embed.weight"


def options(profile):
    ways = Tariff(profile).options([NAME], CLUSTER.network(4), ranks=4, batches=1.0)
    return {one.scheme for one in ways} - PLACEMENTS.keys()


def without_placements(profile):
    return replace(profile, tables=tuple(replace(table, placements=()) for table in profile.tables))


def plan_of(profile, scheme):
    tables = (TablePlan(NAME, profile.tables[0].rows, profile.tables[0].width, scheme),) if scheme else ()
    return Plan({"data": 4}, tables)


def test_it_goes_by_rows_if_it_is_large_and_nothing_else_reads_it():
    assert REPLICA not in options(profile_of(**LARGE))
    assert options(profile_of(rows=4000, is_sparse=False)) == {REPLICA}, "too small to be looked at"
    assert options(without_placements(profile_of(**LARGE))) == {REPLICA}, "maybe an output layer"
    assert options(profile_of(rows=10_000, tokens=40_000, is_sparse=False)) == {REPLICA}, "most rows are looked up"


def test_what_is_sent_falls_and_the_update_and_the_memory_stay():
    profile = profile_of(**LARGE)
    whole, densified, by_rows = (
        lower(plan_of(profile, scheme), profile, CLUSTER) for scheme in (None, "densify", "holders")
    )
    sent = [sum(task.sent_bytes for task in step.tasks if task.kind == "dense") for step in (whole, by_rows)]
    assert sent[0] - sent[1] == pytest.approx(1.5 * 50_000 * 32 * 4, rel=1e-3)
    assert [task.sent_bytes for task in densified.tasks] == [task.sent_bytes for task in whole.tasks]
    updates = [sum(task.seconds for task in step.tasks if task.kind == "update") for step in (whole, by_rows)]
    assert updates[0] == pytest.approx(updates[1])
    assert run(by_rows).step_s < run(whole).step_s
    held = [footprints(plan_of(profile, scheme), profile, CLUSTER)[0] for scheme in (None, "holders")]
    assert held[0].peak_bytes == pytest.approx(held[1].peak_bytes, rel=1e-2)


def test_the_planner_takes_rows_where_it_may_not_split():
    profile = profile_of(**LARGE)
    space = Space(mesh={"pipe": 1, "model": 1}, memories=(Memory(shard_optimizer=True),), shares_with_tables=False)
    plan = best_plan(profile, CLUSTER, space=space)
    assert plan.schemes[NAME] not in PLACEMENTS
    assert "replica" in plan.tables[0].reason, "what it would take whole is told"


def test_beside_full_sharding_it_is_a_parameter_like_others():
    profile = profile_of(layers=8, **LARGE)
    space = Space(mesh={"pipe": 1, "model": 1}, recomputes=False, memories=(Memory(full_shard=True),))
    assert not best_plan(profile, CLUSTER, space=space, memory_bytes=40_000_000).tables
