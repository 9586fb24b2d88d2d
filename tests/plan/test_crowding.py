"""Ranks that share a machine compute faster while others of it wait, by what was measured."""

import random
from collections import Counter
from dataclasses import replace
from itertools import accumulate

import pytest

from profiles import cluster_of, profile_of
from tulle.plan import Plan
from tulle.plan.bound import Bound
from tulle.plan.crowding import Crowding, crowded
from tulle.plan.deal import Deal
from tulle.plan.limit import least_seconds
from tulle.plan.lower import lower, lowered
from tulle.plan.space import cuts
from tulle.simulate import Step, Task, run
from tulle.workload import Machine, Profile

FOUR = (0.25, 0.5, 0.75, 1.0)
"""Four processes on one core."""


def machine(*factors: float) -> Machine:
    return Machine(1e11, 1e10, crowding=factors)


def crowding_of(mesh, factors=FOUR) -> Crowding:
    found = Crowding.of(machine(*factors), mesh)
    assert found is not None
    return found


def chain(stages, seconds, rounds=1) -> Step:
    """Stages that compute one after the other, and send what they have."""
    tasks: list[Task] = []
    for _ in range(rounds):
        for stage in range(stages):
            tasks.append(Task("forward", "device", seconds, (len(tasks) - 1,) if tasks else (), stage=stage))
            tasks.append(Task("send", "link", 1e-3, (len(tasks) - 1,), stage=stage, kind="pipe"))
    return Step({"pipe": stages}, tuple(tasks))


def test_who_computes_while_all_others_wait_has_the_machine():
    found = run(crowded(chain(4, 0.4, rounds=3), crowding_of({"pipe": 4})))
    assert found.step_s == pytest.approx(12 * (0.1 + 1e-3))


def test_two_that_compute_at_a_time_share_it():
    tasks = (Task("a", "device", 0.4, stage=0), Task("b", "device", 0.8, stage=1))
    found = run(crowded(Step({"pipe": 4}, tasks), crowding_of({"pipe": 4}))).timeline(1)
    assert found[0].end_s == pytest.approx(0.2 + 0.1)  # half of it at half the pace, the rest alone


def test_replicas_of_a_stage_compute_at_a_time():
    mesh = {"pipe": 2, "data": 2}
    step = Step(mesh, (Task("a", "device", 1.0, stage=0),))
    assert run(crowded(step, crowding_of(mesh))).step_s == pytest.approx(0.5)


@pytest.mark.parametrize("mesh", [{"data": 4}, {"pipe": 2, "data": 4}, {"pipe": 2, "model": 8}])
def test_nothing_is_shared_with_other_stages_where_machines_have_one(mesh):
    assert Crowding.of(machine(*FOUR), mesh) is None
    assert Crowding.of(machine(), {"pipe": 4}) is None


def in_small_steps(step: Step, crowding: Crowding, step_s: float) -> float:
    """When a step is over, by clocks that tick: each tick who is ready does as much as the machine gives."""
    left_s, over, ticks = [task.seconds for task in step.tasks], set[int](), 0
    while len(over) < len(step.tasks):
        working: dict[object, int] = {}
        for number, task in enumerate(step.tasks):
            if number not in over:
                place = task.stage, task.resource
                working.setdefault(place, number if {*task.after} <= over else -1)
        busy = Counter(stage for (stage, resource), number in working.items() if resource == "device" and number >= 0)
        for (stage, resource), number in working.items():
            if number >= 0:
                here = crowding.machines[crowding.home[stage]]
                computing = sum(ranks for one, ranks in here.items() if busy[one])
                left_s[number] -= step_s / (crowding.factors[computing - 1] if resource == "device" else 1.0)
        over |= {number for number, seconds in enumerate(left_s) if seconds <= step_s / 2}
        ticks += 1
    return ticks * step_s


@pytest.mark.parametrize("seed", range(4))
def test_any_step_takes_what_it_takes_in_small_steps(seed):
    drawn = random.Random(seed)
    mesh = {"pipe": 4, "data": drawn.choice([1, 2])}
    factors = tuple(accumulate((drawn.uniform(0.2, 1.0) for _ in range(drawn.choice([2, 4, 8]))), max))
    crowding = Crowding.of(machine(*(one / factors[-1] for one in factors)), mesh)
    if crowding is None:
        pytest.skip("machines have a stage each")
    tasks: list[Task] = []
    for number in range(24):
        after = tuple(drawn.sample(range(number), min(number, drawn.choice([0, 1, 2]))))
        resource = drawn.choice(["device", "device", "link"])
        tasks.append(Task("", resource, drawn.uniform(0.1, 1.0), after, stage=drawn.randrange(4)))
    step = Step(mesh, tuple(tasks))
    assert run(crowded(step, crowding)).step_s == pytest.approx(in_small_steps(step, crowding, 1e-3), rel=0.01)


def pipelines(seed):
    """Pipelines of small models on machines that ranks share, at random."""
    drawn = random.Random(seed)
    for _ in range(12):
        profile, ranks = profile_of(seed, layers=5), drawn.choice([4, 8])
        cluster = cluster_of(ranks, bandwidth_bytes_per_s=10 ** drawn.uniform(7, 9.5))
        alone = drawn.uniform(0.2, 0.9)
        factors = [alone + (1 - alone) * count / (ranks - 1) for count in range(ranks)]
        cluster = replace(cluster, machine=replace(cluster.machine, crowding=tuple(factors)))
        pipe = drawn.choice([2, 4])
        names = [piece.name for piece in profile.modules]
        stages = dict(zip(names, drawn.choice([*cuts(len(names), pipe)]), strict=True))
        schedule = drawn.choice(["1f1b", "zb-h1", "gpipe"])
        mesh = {"pipe": pipe, "data": ranks // pipe}
        plan = Plan(mesh, stages=stages, micro_batches=drawn.choice([1, 4]), pipeline_schedule=schedule)
        yield profile, cluster, plan


@pytest.mark.parametrize("seed", range(3))
def test_no_pipeline_takes_less_than_its_bounds(seed):
    for profile, cluster, plan in pipelines(seed):
        deal = Deal.of(plan, profile, cluster)
        step_s = run(lowered(deal)).step_s
        of_mesh = Bound(profile, cluster, puts_off=plan.pipeline_schedule == "zb-h1")
        assert least_seconds(deal) <= step_s * (1 + 1e-9)
        assert of_mesh.seconds(deal.share, plan.memory, plan.schedule) <= step_s * (1 + 1e-9)


def test_a_pipeline_gains_where_cores_are_shared_and_replicas_do_not():
    profile, cluster = profile_of(layers=5), cluster_of(4)
    shared = replace(cluster, machine=replace(cluster.machine, crowding=FOUR))
    names = [piece.name for piece in profile.modules]
    stages = {name: min(3, number // 2) for number, name in enumerate(names)}
    pipeline, replicas = Plan({"pipe": 4}, stages=stages, micro_batches=4), Plan({"data": 4})
    took_s = [[run(lower(plan, profile, one)).step_s for one in (cluster, shared)] for plan in (pipeline, replicas)]
    assert took_s[0][1] < 0.8 * took_s[0][0]
    assert took_s[1][1] == took_s[1][0]


def test_a_bound_that_does_not_know_of_it_is_found_out(monkeypatch):
    """The twin: by what stages take while all compute, plans are faster than their bounds."""
    monkeypatch.setattr(Crowding, "least", 1.0)
    shares = []
    for profile, cluster, plan in pipelines(0):
        deal = Deal.of(plan, profile, cluster)
        shares.append(least_seconds(deal) / run(lowered(deal)).step_s)
    assert max(shares) > 1.05


def test_a_profile_keeps_what_was_measured(tmp_path):
    profile = profile_of()
    cluster = replace(profile.cluster, machine=machine(0.5, 1.0))
    replace(profile, cluster=cluster).save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json").cluster == cluster
