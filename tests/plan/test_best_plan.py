"""The planner finds what trying everything finds, keeps to the memory, and says how sure it is."""

import math
import re
from dataclasses import replace
from itertools import combinations, product

import pytest

from profiles import cluster_of, profile_of
from tulle.errors import PlanError
from tulle.plan import Memory, Plan, Space, TablePlan, best_plan, footprints, lower, search
from tulle.plan.bound import Bound
from tulle.plan.deal import Deal
from tulle.plan.exchange import Tariff
from tulle.plan.found import handicap
from tulle.plan.lateness import WORTH_S, put_off_s
from tulle.plan.problem import Problem
from tulle.plan.saving import with_recomputed
from tulle.plan.search import MOST_WORK, Search
from tulle.plan.space import BUCKETS_BYTES
from tulle.plan.work import share_of
from tulle.simulate import run
from tulle.sync import FLAT
from tulle.tables import PLACEMENTS

WAYS = (*FLAT, *PLACEMENTS)


def seconds_of(plan, profile, cluster, batch):
    forecast = run(lower(plan, profile, cluster, batch=batch))
    if plan.schedule == "read" and put_off_s(forecast.by_kind, lookahead=profile.lookahead) < WORTH_S:
        return math.inf
    return (
        handicap(plan.schedule, plan.memory) * forecast.step_s + Deal.of(plan, profile, cluster, batch=batch).unhidden_s
    )


def every_plan(profile, ranks, samples, *, with_recomputed):
    """All that is legal, by itself: nothing of the search is used."""
    names = [piece.name for piece in profile.modules]
    for pipe, model in product(range(1, ranks + 1), repeat=2):
        if ranks % (pipe * model) or pipe > len(names):
            continue
        data = ranks // pipe // model
        mesh = {name: size for name, size in (("pipe", pipe), ("data", data), ("model", model)) if size > 1}
        micro_batches = (
            [1]
            if pipe == 1 and not with_recomputed
            else [m for m in (1, 2, 4, 8, 16) if m <= min(samples / data, 4 * max(pipe, 2))]
        )
        recomputed = [s for size in range(len(names) + 1) for s in combinations(names, size)]
        for cut, split, micro, memory in product(
            combinations(range(1, len(names)), pipe - 1),
            splits_of(profile, model),
            micro_batches,
            [Memory(recompute=subset) for subset in recomputed] if with_recomputed else [Memory()],
        ):
            stages = {name: sum(place >= end for end in cut) for place, name in enumerate(names)}
            frame = Plan({"data": 1} | mesh if data == 1 else mesh, tensor_parallel=split, micro_batches=micro)
            yield replace(frame, stages=stages if pipe > 1 else {}, memory=memory), data, pipe * model


def splits_of(profile, model):
    if model == 1:
        return [()]
    names = [piece.name for piece in profile.modules if piece.split]
    return [subset for size in range(1, len(names) + 1) for subset in combinations(names, size)]


def ways_of(frame, profile, cluster, batch):
    """Where the run-time would send rows in packets, schemes are none."""
    share = share_of(frame, profile, batch)
    names = [table.name for table in profile.tables]
    network = share.network("data", cluster, profile)
    offered = Tariff(profile).options(names, network, ranks=share.data, batches=share.batches)
    if "auto" not in {one.scheme for one in offered}:
        return WAYS
    return ("auto", *PLACEMENTS) if share.data > 1 else ["auto"]


def best_of_all(profile, cluster, *, memory_bytes=None):
    batch = profile.batch * cluster.ranks
    best_s = float("inf")
    every = every_plan(profile, cluster.ranks, batch, with_recomputed=memory_bytes is not None)
    for frame, data, others in every:
        for scheme in ways_of(frame, profile, cluster, batch):
            tables = tuple(TablePlan(table.name, table.rows, table.width, scheme) for table in profile.tables)
            plan = replace(frame, tables=tables)
            kept = footprints(plan, profile, cluster, batch=batch)
            if memory_bytes is not None and max(one.peak_bytes for one in kept) > memory_bytes:
                continue
            for schedule, bucket_bytes in product(("step", "read"), BUCKETS_BYTES):
                if schedule == "read" and (others > 1 or data == 1):
                    continue
                tried = replace(plan, schedule=schedule, bucket_bytes=bucket_bytes)
                best_s = min(best_s, seconds_of(tried, profile, cluster, batch))
    return best_s


@pytest.mark.parametrize(("seed", "crowding"), [(0, ()), (1, ()), (2, ()), (1, (0.5, 1.0)), (2, (0.5, 1.0))])
def test_it_is_the_best_of_all(seed, crowding):
    profile = replace(profile_of(seed), lookahead=seed == 0)
    cluster = cluster_of(2, bandwidth_bytes_per_s=[1e7, 1e8, 1e9][seed])
    cluster = replace(cluster, machine=replace(cluster.machine, crowding=crowding))
    plan = best_plan(profile, cluster)
    assert plan.prediction.is_exact
    found_s = seconds_of(plan, profile, cluster, plan.prediction.batch)
    assert found_s == pytest.approx(best_of_all(profile, cluster), rel=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("ranks", [2, 4])
def test_it_is_the_best_of_all_on_more_ranks(seed, ranks):
    profile = profile_of(seed)
    cluster = cluster_of(ranks, bandwidth_bytes_per_s=10 ** (7 + seed / 2))
    crowding = tuple(share / ranks for share in range(1, ranks + 1)) if seed % 2 else ()
    cluster = replace(cluster, machine=replace(cluster.machine, crowding=crowding))
    plan = best_plan(profile, cluster)
    assert plan.prediction.is_exact
    found_s = seconds_of(plan, profile, cluster, plan.prediction.batch)
    assert found_s == pytest.approx(best_of_all(profile, cluster), rel=1e-12)


@pytest.mark.parametrize("share", [pytest.param(0.6, marks=pytest.mark.slow), 0.85])
def test_it_is_the_best_of_those_that_fit(share):
    profile, cluster = profile_of(3, layers=1, activations=40), cluster_of(2)
    free = best_plan(profile, cluster)
    limit_bytes = int(share * max(free.prediction.memory_bytes))
    plan = best_plan(profile, cluster, memory_bytes=limit_bytes)
    assert max(plan.prediction.memory_bytes) <= limit_bytes
    kept = footprints(plan, profile, cluster, batch=plan.prediction.batch)
    assert [one.peak_bytes for one in kept] == [*plan.prediction.memory_bytes]
    found_s = seconds_of(plan, profile, cluster, plan.prediction.batch)
    assert found_s == pytest.approx(best_of_all(profile, cluster, memory_bytes=limit_bytes), rel=1e-12)


def test_a_stage_that_fits_recomputes_nothing():
    """The first stage of 1F1B holds activations of two micro-batches, the last of one."""
    profile, cluster = replace(profile_of(3, layers=8, activations=10), tables=()), cluster_of(2)
    stages = {piece.name: 5 * number // len(profile.modules) // 3 for number, piece in enumerate(profile.modules)}
    plan = Plan({"pipe": 2, "data": 1}, stages=stages, micro_batches=4)

    def peaks(memory):
        found = footprints(replace(plan, memory=memory), profile, cluster, batch=32)
        return [one.peak_bytes for one in found]

    first, last = peaks(Memory())
    assert last < 0.9 * first
    [memory] = with_recomputed(plan, profile, peaks, int(0.9 * first)).memories
    assert max(peaks(memory)) <= 0.9 * first
    assert {stages[name] for name in memory.recompute} == {0}
    assert peaks(memory)[1] == last


def test_a_bound_that_is_too_high_is_found_out(monkeypatch):
    """The twin: with bounds that promise too much the best is cut off, and the comparison above sees it."""
    real = Bound.seconds
    profile, cluster = profile_of(0), cluster_of(2)
    best_s = best_of_all(profile, cluster)

    def too_high(self, share, memory, schedule, *, is_sharp=True):
        return real(self, share, memory, schedule, is_sharp=is_sharp) * (1 if share.data == 2 else 10)

    monkeypatch.setattr(Bound, "seconds", too_high)
    plan = best_plan(profile, cluster)
    assert seconds_of(plan, profile, cluster, plan.prediction.batch) > 1.01 * best_s


@pytest.mark.parametrize("seed", [4, 5])
def test_no_plan_is_faster_than_its_bound(seed):
    profile, cluster = profile_of(seed), cluster_of(4)
    search = Search(Problem(profile, cluster, 32, Space(), None, Tariff(profile)))
    search.run()
    for found in search.found():
        assert found.score_s >= search.least_s(found.plan) * (1 - 1e-12)


def test_no_plan_fits_in_nothing():
    with pytest.raises(
        PlanError, match=r"no plan fits in 1,000 bytes a rank on 2 ranks, the least needs \d"
    ) as refused:
        best_plan(profile_of(), cluster_of(2), memory_bytes=1000)
    needed, missing, *parts = (int(n.replace(",", "")) for n in re.findall(r"[\d,]*\d", str(refused.value))[2:])
    assert missing == needed - 1000
    assert sum(parts) == needed, "what it is for"
    assert parts == sorted(parts, reverse=True)


def test_a_faster_network_is_never_slower():
    profile = profile_of(6)
    steps_s = [
        best_plan(profile, cluster_of(4, bandwidth_bytes_per_s=bandwidth)).prediction.step_s
        for bandwidth in (1e7, 1e8, 1e9)
    ]
    assert steps_s == sorted(steps_s, reverse=True)


def test_more_memory_is_never_slower():
    profile, cluster = profile_of(3, layers=2, activations=40), cluster_of(2)
    whole = max(best_plan(profile, cluster).prediction.memory_bytes)
    limits = [int(share * whole) for share in (0.6, 0.7, 0.9, 1.0)]
    steps_s = [best_plan(profile, cluster, memory_bytes=limit).prediction.step_s for limit in limits]
    assert steps_s == sorted(steps_s, reverse=True)


def test_parameters_are_shared_out_where_nothing_else_fits():
    profile, cluster = profile_of(tables=0), cluster_of(4)
    space = Space(mesh={"pipe": 1, "model": 1}, recomputes=False)
    assert not best_plan(profile, cluster, space=space).memory.full_shard
    others = replace(space, memories=(Memory(), Memory(shard_optimizer=True)))
    with pytest.raises(PlanError, match="no plan fits") as refused:
        best_plan(profile, cluster, space=others, memory_bytes=1)
    least_bytes = int(re.search(r"the least needs ([\d,]+)", str(refused.value))[1].replace(",", ""))
    assert best_plan(profile, cluster, space=space, memory_bytes=least_bytes - 1).memory == Memory(full_shard=True)
    with_tables = profile_of(tables=1)
    assert all(not one.full_shard for one in space.memories_for(with_tables, 4, is_tight=True)), "none that is sparse"


def test_a_table_with_dense_gradients_is_shared_out_as_other_parameters_where_nothing_else_fits():
    """A language model's embedding must not keep it from what fits."""
    profile, cluster = profile_of(layers=8, is_sparse=False), cluster_of(4)
    space = Space(mesh={"pipe": 1, "model": 1}, recomputes=False)
    others = replace(space, memories=(Memory(), Memory(shard_optimizer=True)))
    with pytest.raises(PlanError, match="no plan fits"):
        best_plan(profile, cluster, space=others, memory_bytes=20_000_000)
    plan = best_plan(profile, cluster, space=space, memory_bytes=20_000_000)
    assert plan.memory == Memory(full_shard=True)
    assert not plan.tables, "it is no table of a plan's"


def test_what_is_fixed_stays():
    profile, cluster = profile_of(), cluster_of(4)
    space = Space(mesh={"pipe": 2}, schemes={"embed.weight": "allgather"}, schedules=("step",))
    plan = best_plan(profile, cluster, space=space)
    assert plan.mesh["pipe"] == 2
    assert plan.schemes == {"embed.weight": "allgather"}


def test_a_mesh_that_the_model_cannot_use_is_refused():
    with pytest.raises(PlanError, match=r"no mesh of 16 ranks has \{'pipe': 16\}"):
        best_plan(profile_of(), cluster_of(16), space=Space(mesh={"pipe": 16}))


def test_what_lookahead_would_gain_is_priced_and_offered():
    profile, cluster = profile_of(), cluster_of(4, bandwidth_bytes_per_s=1e9)
    space = Space(mesh={"data": 4}, schemes={"embed.weight": "rows"}, schedules=("step",))
    plain, ahead = (best_plan(profile, cluster, space=space, lookahead=told) for told in (None, True))
    assert (plain.prediction.lookahead, ahead.prediction.lookahead) == (False, True)
    assert plain.prediction.step_s > ahead.prediction.step_s + 4e-4, "two latencies more are waited for"
    told = plain.explain()
    assert "rows of split tables are told in forward, which waits for that" in told
    assert re.search(r"offered: for batch in tulle\.lookahead\(loader\): .* a step takes [\d.]+ ms instead of", told)
    assert "a step ahead, in a loop through tulle.lookahead" in ahead.explain()
    assert not ahead.offers
    assert not best_plan(profile_of(tables=0), cluster, space=Space(mesh={"data": 4})).offers


def test_sizes_that_do_not_divide_the_ranks_are_refused_as_such():
    with pytest.raises(PlanError, match=r"no mesh of 4 ranks has \{'data': 3\}: sizes of axes multiply to that number"):
        best_plan(profile_of(), cluster_of(4), space=Space(mesh={"data": 3}))


def test_a_cut_that_is_too_slow_in_any_case_is_not_asked_for_its_tables(monkeypatch):
    """Of many tables it takes seconds to tell what they send along a mesh; the plan is the same."""
    profile, cluster = profile_of(tables=2, layers=4), cluster_of(8)
    search = Search(Problem(profile, cluster, 64, Space(), None, Tariff(profile)))
    plan = search.run()
    monkeypatch.setattr(Search, "_is_hopeless", lambda self, dealt: False)
    other = Search(Problem(profile, cluster, 64, Space(), None, Tariff(profile)))
    assert other.run() == plan
    assert search.problem.tariff.worked < other.problem.tariff.worked


def test_the_plan_survives_json(tmp_path):
    plan = best_plan(profile_of(), cluster_of(2))
    plan.save(tmp_path / "plan.json")
    read = Plan.load(tmp_path / "plan.json")
    assert read == plan
    assert read.prediction == plan.prediction
    assert read.explain() == plan.explain()


def test_the_runner_up_does_something_else_and_is_no_faster():
    plan = best_plan(profile_of(1), cluster_of(4))
    assert plan.prediction.runner_up
    assert plan.prediction.runner_up_s >= plan.prediction.step_s


def test_replicas_are_looked_at_however_little_the_search_may_do(monkeypatch):
    profile, cluster = profile_of(2, tables=0, layers=6), cluster_of(4)
    monkeypatch.setattr(search, "MOST_WORK", 0)
    plan = best_plan(profile, cluster, space=Space(mesh={"model": 1}, memories=(Memory(),), schedules=("step",)))
    assert dict(plan.mesh) == {"data": 4}
    assert not plan.prediction.is_exact
    assert plan.prediction.step_s == run(lower(plan, profile, cluster)).step_s


def test_what_does_not_run_on_half_of_a_sample_is_not_cut_into_micro_batches():
    profile, cluster = profile_of(tables=0, layers=4), cluster_of(2)
    space = Space(mesh={"pipe": 2})
    assert best_plan(profile, cluster, space=space).micro_batches > 1
    assert best_plan(replace(profile, is_divisible=False), cluster, space=space).micro_batches == 1


def test_parameters_are_not_shared_out_for_next_to_nothing():
    space = Space(mesh={"pipe": 1, "model": 1}, memories=(Memory(), Memory(full_shard=True)), schedules=("step",))
    profile, cluster = profile_of(tables=0), cluster_of(2, bandwidth_bytes_per_s=1e12)
    chosen: list[bool] = []
    for step_s_per_byte in (1e-11, 1e-8):  # what can be gained is half of the update
        optimizer = replace(profile.optimizer, step_s_per_byte=step_s_per_byte)
        plan = best_plan(replace(profile, optimizer=optimizer), cluster, space=space)
        chosen.append(plan.memory.full_shard)
    assert chosen == [False, True]


def test_what_each_call_of_the_optimizer_takes_is_not_shared_out():
    profile, cluster = profile_of(tables=0), cluster_of(4)
    plan = Plan({"data": 4}, memory=Memory(shard_optimizer=True))
    updates = []
    for fixed_share in (0.0, 0.5, 1.0):
        optimizer = replace(profile.optimizer, fixed_share=fixed_share)
        tasks = lower(plan, replace(profile, optimizer=optimizer), cluster).tasks
        updates.append(sum(task.seconds for task in tasks if task.kind == "update"))
    whole_s = sum(piece.parameters_bytes for piece in profile.modules) * profile.optimizer.step_s_per_byte
    assert updates == pytest.approx([whole_s / 4, whole_s * 5 / 8, whole_s])


def test_what_a_stage_has_all_of_is_placed_as_one():
    profile, cluster = profile_of(tables=0, layers=4), cluster_of(2)
    embed, *layers = profile.modules
    modules = (
        replace(embed, forward_s=1.0, around=("",)),
        *(replace(layer, around=("", "layers")) for layer in layers),
    )
    profile = replace(profile, modules=modules)
    plan = best_plan(profile, cluster, space=Space(mesh={"pipe": 2, "data": 1}))
    assert dict(plan.stages) == {"embed": 0, "layers": 1}
    run(lower(plan, profile, cluster))  # which finds each piece in what is around it


def test_the_search_ends_alike_on_all_ranks():
    """It is bounded by a count, not by a clock."""
    profile, cluster = profile_of(2), cluster_of(4)
    assert best_plan(profile, cluster) == best_plan(profile, cluster)
    assert MOST_WORK > 0


def test_memories_that_are_fixed_stay_and_are_named_where_none_can_be_used():
    profile, space = profile_of(tables=0), Space(memories=(Memory(shard_optimizer=True),))
    assert best_plan(profile, cluster_of(2), space=space).memory == Memory(shard_optimizer=True)
    with pytest.raises(PlanError, match="none of the space's memories can be used on 2 ranks"):
        best_plan(profile, cluster_of(2), space=replace(space, mesh={"data": 1}))


def test_a_step_with_fewer_samples_than_replicas_is_refused_as_such():
    with pytest.raises(PlanError, match="a step of 1 sample is too small for every mesh of 4 ranks"):
        best_plan(profile_of(), cluster_of(4), batch=1, space=Space(mesh={"data": 4}))


@pytest.mark.parametrize(
    ("worth_s", "schedules", "chosen"),
    [(0.02, ("step", "read"), "read"), (0.05, ("step", "read"), "step"), (0.05, ("read",), "read")],
)
def test_updates_wait_for_reads_only_where_enough_is_put_off(worth_s, schedules, chosen, monkeypatch):
    monkeypatch.setattr(search, "WORTH_S", worth_s)  # of 31 ms
    space = Space(mesh={"pipe": 1, "model": 1}, schedules=schedules)
    assert best_plan(profile_of(1, ranks=4), cluster_of(4, bandwidth_bytes_per_s=3e8), space=space).schedule == chosen
