"""What a plan takes at least, told without simulating it, is never more than what the simulation says."""

import importlib
import random
from dataclasses import replace
from statistics import median

import pytest

from profiles import cluster_of, profile_of
from tulle.plan import AT_READ, Memory, Plan, Space, TablePlan
from tulle.plan.bound import Bound
from tulle.plan.deal import Deal
from tulle.plan.limit import least_seconds
from tulle.plan.lower import lowered
from tulle.plan.space import cuts, subsets
from tulle.plan.work import total_s
from tulle.simulate import run
from tulle.sync import FLAT

WAYS = (*FLAT, "rows", "columns")


def plans(seed, count=15):
    """Legal plans of small models, at random."""
    drawn = random.Random(seed)
    for number in range(count):
        profile = profile_of(seed, layers=drawn.choice([1, 3]), tables=2, is_sparse=drawn.random() < 0.8)
        ranks = drawn.choice([2, 4, 8])
        cluster = cluster_of(ranks, bandwidth_bytes_per_s=10 ** drawn.uniform(6.5, 9.5))
        mesh = drawn.choice(Space().meshes(ranks, profile))
        names = [piece.name for piece in profile.modules]
        pipe, model = mesh.get("pipe", 1), mesh.get("model", 1)
        stages = drawn.choice([*cuts(len(names), pipe)])
        split = [piece.name for piece in profile.modules if piece.split]
        yield (
            profile,
            cluster,
            Plan(
                mesh,
                tuple(TablePlan(t.name, t.rows, t.width, drawn.choice(WAYS)) for t in profile.tables if t.is_sparse),
                stages=dict(zip(names, stages, strict=True)) if pipe > 1 else {},
                micro_batches=drawn.choice([1, 2, 4]),
                tensor_parallel=drawn.choice([*subsets(split)][1:]) if model > 1 else (),
                memory=Memory(shard_optimizer=drawn.random() < 0.2, recompute=tuple(names[: drawn.choice([0, 0, 2])])),
                schedule=AT_READ if pipe == model == 1 and number % 2 else "step",
                bucket_bytes=drawn.choice([2**20, 25 * 2**20]),
            ),
        )


def shares(seed):
    """What each plan, and what each plan on its mesh, takes at least, by what it is simulated to take."""
    for number, (profile, cluster, plan) in enumerate(plans(seed)):
        deal = Deal.of(plan, profile, cluster, lookahead=number % 3 == 0)
        step_s = run(lowered(deal)).step_s
        of_mesh_s = Bound(profile, cluster).seconds(deal.share, plan.memory, plan.schedule)
        yield least_seconds(deal) / step_s, of_mesh_s / step_s


@pytest.mark.parametrize("seed", range(3))
def test_no_plan_takes_less(seed):
    of_plans, of_meshes = zip(*shares(seed), strict=True)
    assert max(*of_plans, *of_meshes) <= 1 + 1e-9
    assert median(of_plans) > 0.8
    assert median(of_meshes) > 0.4


def test_a_limit_that_counts_what_overlaps_is_found_out(monkeypatch):
    """The twin: if nothing of a last backward could be sent beside it, plans would be faster than that."""
    limit = importlib.import_module("tulle.plan.limit")
    monkeypatch.setattr(
        limit, "_synchronized_s", lambda bundles, works, dense_s: sum(map(total_s, works)) + sum(dense_s)
    )
    assert max(of_plan for of_plan, _ in shares(1)) > 1.01


def test_what_another_schedule_and_other_buckets_make_of_a_deal_is_what_the_plan_is():
    profile, cluster = profile_of(), cluster_of(4)
    plan = Plan({"data": 4}, tuple(TablePlan(t.name, t.rows, t.width, "rows") for t in profile.tables))
    other = replace(plan, schedule=AT_READ, bucket_bytes=2**20)
    assert lowered(Deal.of(plan, profile, cluster).under(other)) == lowered(Deal.of(other, profile, cluster))
